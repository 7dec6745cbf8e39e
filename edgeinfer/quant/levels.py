"""Levels of a tensor's own table: weighted k-means of its weights, each divided by its group's scale.

Levels, scales and codes are fitted by turns to a sample of the rows: scales to the levels as for every type
(`fitting`), then each level to the weights whose codes have it. Afterwards the largest level is 127, and all are
integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import fitting
from .fitting import Floats, Grid, inverse
from .table import IQ4_LEVELS
from .types import WeightType

SAMPLE_WEIGHTS = 1 << 16
"""Weights that the levels are fitted to: more lower the squared error by less than 0.1 %."""
ROUNDS = 10
RELAXATION = 2.0
"""Steps that levels go towards the centres of their weights: with 1 they end where each is rounded to where it was."""
LARGEST = 127


def fit_levels(weights: Floats, stored: WeightType, by: Floats | None = None) -> tuple[int, ...]:
    """Fit the levels of a type that leaves them to the tensor.

    Parameters
    ----------
    weights : float32 array of shape (rows, cols)
        All of the matrix, or rows that are spread over it; of many rows some are taken.
    stored : WeightType
    by : float32 array of shape (cols,), optional
        Weight of the squared error of each column.

    Returns
    -------
    tuple of int
        Ascending, in [-127, 127]: as many as there are codes.
    """
    step = max(1, weights.size // SAMPLE_WEIGHTS)
    groups, counts = _grouped(weights[::step], stored.group_size, by)
    best, least = first(stored), np.inf
    levels = np.array(best, np.float64)
    for _ in range(ROUNDS):
        now = _integers(levels)
        grid = Grid.of(stored, now)
        scale = fitting.fit(groups, counts, grid, False).scale
        codes = grid.codes_of(groups * inverse(scale))
        error = float(np.einsum("gn,gn->", counts, np.square(groups - grid.values(codes) * scale)))
        if error < least:
            best, least = now, error
        current = np.array(now, np.float64)
        levels = current + RELAXATION * (_centres(groups, counts, scale, codes, current) - current)
        levels = np.sort(levels) * (LARGEST / max(float(np.abs(levels).max()), 1e-30))
    return best


def first(stored: WeightType) -> tuple[int, ...]:
    """Return the levels that fitting begins with: near the quantiles of a bell curve."""
    return _integers(np.interp(np.linspace(0, 15, 1 << stored.storage.bits), np.arange(16), IQ4_LEVELS))


def _grouped(weights: Floats, group: int, by: Floats | None) -> tuple[Floats, Floats]:
    """Weights as (group, n), and the weights of their errors."""
    rows, cols = weights.shape
    padded = np.zeros((rows, -(-cols // group) * group), np.float32)
    counts = np.zeros_like(padded)
    padded[:, :cols] = weights
    counts[:, :cols] = 1 if by is None else by
    return tuple(np.ascontiguousarray(part.reshape(-1, group).T) for part in (padded, counts))  # type: ignore[return-value]


def _centres(w: Floats, by: Floats, scale: Floats, codes: NDArray[np.int8], levels: NDArray[np.float64]
             ) -> NDArray[np.float64]:
    """The level of each code that suits its weights best, ascending; that of a code without weights stays."""
    n, flat = len(levels), codes.reshape(-1)
    weight = by * (scale * scale)
    total = np.bincount(flat, weight.reshape(-1), n)
    of_w = np.bincount(flat, (by * scale * w).reshape(-1), n)
    return np.sort(np.where(total > 0, of_w / np.maximum(total, 1e-30), levels))


def _integers(levels: NDArray[np.float64]) -> tuple[int, ...]:
    """Round to different integers in [-127, 127]."""
    whole = np.rint(levels).astype(int)
    for i in range(1, len(whole)):
        whole[i] = max(whole[i], whole[i - 1] + 1)
    over = whole[-1] - LARGEST
    if over > 0:
        whole[-1] = LARGEST
        for i in range(len(whole) - 2, -1, -1):
            whole[i] = min(whole[i], whole[i + 1] - 1)
    return tuple(int(level) for level in whole)
