"""Weights of a GGUF file that are stored as they are: blocks of rows are reordered and packed on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.graph import ORDER, HeadOrder, RopeHalves, Rows, Source, Step, Weight
from edgeinfer.quant import WeightType

from ..assembly import block_of, block_ranges, in_order
from .blocks import has_packing, pack_blocks, restated
from .tensors import GgufFile
from .types import BY_NAME, TERNARY

Bytes = NDArray[np.uint8]
BLOCK_BYTES = 1 << 20
"""Bytes of the rows that one thread packs at a time."""


def moved(files: Mapping[str, GgufFile], weight: Weight, stored: WeightType, count: Callable[[str, int], None]
          ) -> Iterator[Bytes] | None:
    """The stored bytes of a weight, block by block, its codes and scales moved; None if values must be calculated.

    Parameters
    ----------
    files : mapping
        The file of each tensor, by the tensor's name.
    weight : Weight
    stored : WeightType
    count : callable
        Called with the name of a tensor and the number of its elements that were read.
    """
    if stored == ORDER:
        return iter((_order(weight),))
    kinds = {files[source.name].tensors[source.name].dtype for source in weight.sources}
    kind = _common(kinds, stored)
    by_rows = all(len(source.part) == 2 and all(map(_moves_rows, source.steps)) for source in weight.sources)
    if not by_rows or weight.kind == "vector" or not has_packing(kind, stored):
        return None

    name = ", ".join(dict.fromkeys(source.name for source in weight.sources))
    width = BY_NAME[kind].bytes_of(weight.shape[1])

    def packed(start: int, stop: int) -> tuple[Bytes, list[tuple[str, int]]]:
        done: list[tuple[str, int]] = []

        def read(source: Source, first: int, last: int) -> Bytes:
            file = files[source.name]
            rows = _rows(file, source, first, last)
            done.append((source.name, (last - first) * source.part[1]))
            return restated(rows, file.tensors[source.name].dtype, kind)

        return pack_blocks(block_of(weight, start, stop, width, np.uint8, read), kind, stored, name), done

    def on_block(done: list[tuple[str, int]]) -> None:
        for name, elements in done:
            count(name, elements)

    return in_order(packed, block_ranges(weight, width, BLOCK_BYTES), on_block)


def _moves_rows(step: Step) -> bool:
    return isinstance(step, RopeHalves | Rows) or (isinstance(step, HeadOrder) and step.axis == "rows")


def _order(weight: Weight) -> Bytes:
    """The input that each column of a file's matrix multiplies, as int32."""
    step = next(step for step in weight.sources[0].steps if isinstance(step, HeadOrder))
    return np.argsort(step.position(np.arange(weight.shape[0]))).astype("<i4").view(np.uint8)


def _common(kinds: set[str], stored: WeightType) -> str:
    """The type that rows of these types are packed as; empty if there is none.

    Codes of Q4_0 are some of Q8_0's, and those of ternary types some of both.
    """
    if stored.dtype == "q2" and kinds <= set(TERNARY):
        return "Q2_0"
    if stored.dtype == "q4" and kinds <= {"Q4_0", *TERNARY}:
        return "Q4_0"
    if stored.dtype == "int8" and kinds <= {"Q8_0", "Q4_0", *TERNARY}:
        return "Q8_0"
    return next(iter(kinds)) if len(kinds) == 1 else ""


def _rows(file: GgufFile, source: Source, start: int, stop: int) -> Bytes:
    """Rows of a source in the file's own form; a few between them that are not wanted are read too."""
    rows = np.arange(start, stop)
    for step in reversed(source.steps):
        rows, _ = step.origin(rows, None)
    if source.index:
        rows = rows + int(np.ravel_multi_index(source.index, source.stored[:-2])) * source.stored[-2]
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low > 2 * len(rows):
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return np.concatenate([file.read_rows(source.name, int(run[0]), int(run[-1]) + 1) for run in runs])
    raw = file.read_rows(source.name, low, high)
    return raw[rows - low] if source.steps else raw
