"""Read the sources of weights: the wanted rows and columns of a checkpoint, all steps taken, in bounded memory."""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.graph import Graph, Source
from edgeinfer.quant import quantise

from .directory import Checkpoint

BLOCK_WEIGHTS = 1 << 20
"""Weights handled at a time: 4 MB as float32, and about 10 MB with everything made of them."""
Indices = NDArray[Any]
Own = TypeVar("Own", bound="SourceReader")


class SourceReader:
    """Reads blocks of sources as float32, and counts the bytes of the checkpoint, each once.

    Attributes
    ----------
    total : int
        Bytes of all tensors that the graph needs.
    """

    def __init__(self, checkpoint: Checkpoint, graph: Graph, progress: OnStageProgress | None):
        self.checkpoint = checkpoint
        self._progress = progress
        parts = (part for weight in graph.weights for source in weight.sources for part in source.parts)
        names = {checkpoint.stored(part.name) for part in parts}
        self._left = {name: checkpoint.tensor(name).nbytes for name in names}
        self.total = sum(self._left.values())
        self._done = 0

    def uncounted(self: Own) -> Own:
        """Return a reader of the same weights whose reads are no progress: all of them are read once more."""
        other = copy(self)
        other._left, other._progress = dict(self._left), None
        return other

    def rows(self, source: Source, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start to stop of a source, of shape (rows, columns); a vector has one column."""
        return self._block(source, np.arange(start, stop), np.arange(prod(source.shape[1:])))

    def columns(self, source: Source, start: int, stop: int) -> NDArray[np.float32]:
        """Columns start to stop of a source, of shape (rows, columns)."""
        return self._block(source, np.arange(source.shape[0]), np.arange(start, stop))

    def _block(self, source: Source, rows: Indices, columns: Indices) -> NDArray[np.float32]:
        """Go back from the wanted indices to those in the tensor, then forward with the values."""
        indices = [(rows, columns)]
        for step in reversed(source.steps):
            indices.append(step.origin(*indices[-1]))
        values = self._stored(source, *indices.pop())
        with np.errstate(over="ignore"):  # values that become too large are refused below
            for step in source.steps:
                values = step.apply(values, *indices.pop(), self._elements)
        if source.steps:
            name = f"{self.checkpoint.stored(source.name)} after its steps"
            quantise.check_finite(values, name, lambda row, column: [int(rows[row]), int(columns[column])])
        return values

    def _elements(self, vector: Source, which: Indices) -> NDArray[np.float32]:
        return self._block(vector, which, np.arange(1))[:, 0]

    def _stored(self, source: Source, rows: Indices, columns: Indices) -> NDArray[np.float32]:
        """Rows and columns of the tensor itself, or of the item that is chosen of it."""
        name, shape, whole = source.name, source.stored, source.stored[len(source.index) :]
        item = int(np.ravel_multi_index(source.index, shape[: len(source.index)])) if source.index else 0
        width = prod(whole[1:])
        starts = item * prod(whole) + rows * width
        low, span = int(columns.min()), int(np.ptp(columns)) + 1
        if span == width and _is_range(columns) and _is_range(rows):
            values = self.checkpoint.read(name, [int(starts[0])], len(rows) * width).reshape(len(rows), width)
        elif width == 1 and int(np.ptp(rows)) < 4 * len(rows):  # of a vector, single elements are many reads
            first, last = int(rows.min()), int(rows.max()) + 1
            values = self.checkpoint.read(name, [int(starts[0]) + first - int(rows[0])], last - first)
            values = values.reshape(-1, 1)[rows - first]
        else:
            values = np.empty((len(rows), len(columns)), np.float32)
            step = max(1, BLOCK_WEIGHTS // span)
            for i in range(0, len(rows), step):
                pieces = self.checkpoint.read(name, (starts[i : i + step] + low).tolist(), span)
                values[i : i + step] = pieces if _is_range(columns) else pieces[:, columns - low]

        def index_of(row: int, column: int) -> list[int]:
            element = starts[row] + columns[column]
            return [int(i) for i in np.unravel_index(element, shape if len(shape) > 1 else (*shape, 1))]

        quantise.check_finite(values, self.checkpoint.stored(name), index_of)
        self.count(name, values.size)
        return values

    def count(self, name: str, elements: int) -> None:
        """Elements of a tensor were read, perhaps not for the first time."""
        name = self.checkpoint.stored(name)
        tensor = self.checkpoint.tensor(name)
        new = min(elements * tensor.nbytes // prod(tensor.shape), self._left[name])
        self._left[name] -= new
        self._done += new
        if self._progress:
            self._progress(self._done, self.total, name)


def _is_range(indices: Indices) -> bool:
    return bool((np.diff(indices) == 1).all())
