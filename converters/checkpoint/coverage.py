"""Assignment of each part of a checkpoint's tensor to one weight, unless the architecture says otherwise."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import Source, Tap

Use = tuple[str, Source, bool]
"""Name of a weight, the part of a tensor that it takes, and whether others may take it too."""
Indices = NDArray[Any]


def check_uses(uses: list[Use], path: Path, model_type: str) -> None:
    """Refuse a tensor of which some rows belong to no weight, or to two that do not say so; its shape is known.

    Raises `CheckpointError`.
    """
    if len(uses) == 1 and not uses[0][1].steps and not uses[0][1].index:
        return  # the whole tensor belongs to one weight
    stored = uses[0][1].stored
    if any(isinstance(step, Tap) for step in uses[0][1].steps):  # channels by width, and a 1 somewhere
        stored = (stored[0], prod(stored[1:]))
    shape = stored if len(stored) > 1 else (*stored, 1)
    taken = [_ranges(source, shape) for _, source, _ in uses]
    masks = np.zeros((len(uses), shape[-1]), bool)
    for mask, (_, columns) in zip(masks, taken, strict=True):
        mask[columns] = True
    if masks.all():  # as nearly always, and sorting columns takes a while
        kinds = np.zeros(shape[-1], np.intp)
    else:
        _, kinds = np.unique(masks, axis=1, return_inverse=True)  # columns that the same weights take
        kinds = kinds.reshape(-1)
    for kind in range(kinds.max() + 1):
        columns = np.flatnonzero(kinds == kind)
        owner = np.full(prod(shape[:-1]), -1)
        free = np.ones(len(owner), bool)
        for i in np.flatnonzero(masks[:, columns[0]]):
            (weight, source, shared), rows = uses[i], taken[i][0]
            free[rows] = False
            if shared:
                continue
            if (twice := rows[owner[rows] >= 0]).size:
                other = owner[twice.min()]
                where = _named(source.name, shape, twice[owner[twice] == other], columns)
                raise CheckpointError(f"{where} in {path} belong to both {uses[other][0]} and {weight}; the "
                                      "architecture's file must say so (shared).")
            owner[rows] = i
        if free.any():
            raise CheckpointError(
                f"{_named(uses[0][1].name, shape, np.flatnonzero(free), columns)} in {path} are not part of a "
                f"{model_type} model; config.json and the weights do not fit together."
            )


def _ranges(source: Source, shape: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Rows (counted over all items) and columns of the tensor that a source takes."""
    rows, columns = np.arange(source.shape[0]), np.arange(prod(source.shape[1:]))
    for step in reversed(source.steps):
        rows, columns = step.origin(rows, columns)
    item = int(np.ravel_multi_index(source.index, shape[: len(source.index)])) if source.index else 0
    if len(source.index) == len(shape) - 1:  # a vector of a stack: a row
        return np.array([item]), rows
    return item * shape[-2] + rows, columns


def _named(name: str, shape: tuple[int, ...], rows: Indices, columns: Indices) -> str:
    """The first run of rows in words, with its columns where it has not all."""
    first, last = _run(np.sort(rows))
    item, row = divmod(first, shape[-2])
    last = min(last - first + row, shape[-2] - 1)
    index = "".join(f"[{int(i)}]" for i in np.unravel_index(item, shape[:-2]))
    part = "" if len(columns) == shape[-1] else ", columns {} to {}".format(*_run(columns))
    return f"Rows {row} to {last}{part} of the tensor {name}{index}"


def _run(indices: Indices) -> tuple[int, int]:
    """The first of ascending indices, and the last that follows it without a gap."""
    gaps = np.flatnonzero(np.diff(indices) != 1)
    return int(indices[0]), int(indices[gaps[0] if len(gaps) else -1])
