"""Choose codes and scales: each group's squared error is minimised over a fan of scales, refined by least squares.

Rounding to nearest with a scale taken from the largest weight alone (the usual start) wastes the range on one outlier.
For given codes q the best scale is <w, q> / <q, q>, and its squared error <w, w> - <w, q>^2 / <q, q>; so a fan of
candidate scales is compared by that quotient, the best one is refined, rounded to fp16, and only then the final codes
are chosen. The 4-bit grid -8..7 is not symmetric, so scales of both signs are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from ..base.dataclass import dataclass
from ..base.process import usable_cores
from .table import TYPES

Floats = NDArray[np.float32]

BLOCK_WEIGHTS = 1 << 17
"""Weights that one thread handles at a time: its temporaries (about 0.5 MB a copy) stay in cache and bounded."""
REFINEMENTS = 2
FP16_MAX = 65504.0

# The code that the weight of largest magnitude is put on, before rounding and clipping. The first is the usual choice;
# the best of each group's fan then gets neighbours on both sides. Types without a fan of their own have a plain one.
FANS: dict[str, tuple[float, ...]] = {
    "q4": (-8.0, *np.linspace(-9.2, -4.5, 19).tolist(), *np.linspace(4.2, 8.2, 15).tolist()),
    "int8": (127.0, 126.5, 126.0, 125.0, 124.0, 122.0, 120.0, 117.0, 114.0),
}
NEIGHBOURS = {"q4": (-0.2, -0.15, -0.1, -0.05, 0.05, 0.1, 0.15, 0.2), "int8": (-0.25, 0.25)}


@dataclass(frozen=True)
class ErrorSums:
    """Squared errors of a quantised tensor; sums of parts add up."""

    squared_error: float = 0.0
    """Sum of (weight - code x scale)^2."""
    squared_error_max_based: float = 0.0
    """The same had every scale been chosen from the largest weight of its group alone."""
    squared_norm: float = 0.0
    """Sum of weight^2."""

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            self.squared_error + other.squared_error,
            self.squared_error_max_based + other.squared_error_max_based,
            self.squared_norm + other.squared_norm,
        )

    @property
    def relative(self) -> float:
        """Squared error / squared norm."""
        return self.squared_error / self.squared_norm if self.squared_norm else 0.0

    @property
    def gain(self) -> float:
        """Share of the max-based squared error that the search for scales has removed."""
        return 1 - self.squared_error / self.squared_error_max_based if self.squared_error_max_based else 0.0


def quantise(
    weights: Floats, dtype: str, group_size: int, name: str = "weights", threads: int | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float16], ErrorSums]:
    """Quantise the rows of a matrix in groups of columns.

    Parameters
    ----------
    weights : float32 array of shape (rows, cols)
    dtype : str
        A type with a uniform grid: codes are from its lowest to its highest level.
    group_size : int
        Columns that share one scale; a last group may be shorter.
    name : str
        For the error message.
    threads : int, optional
        Default: the cores that this process may use.

    Returns
    -------
    codes : int8 array of shape (rows, cols)
    scales : float16 array of shape (rows, ceil(cols / group_size))
        weight ~ code x scale; may be negative, and 0 if a whole group is zero.
    errors : ErrorSums

    Raises
    ------
    CheckpointError
        If a weight is NaN or infinite, or so large that its scale exceeds fp16.
    """
    rows, cols = weights.shape
    groups = -(-cols // group_size)
    codes = np.empty((rows, cols), np.int8)
    scales = np.empty((rows, groups), np.float16)
    step = max(1, BLOCK_WEIGHTS // (groups * group_size))

    def block(start: int) -> ErrorSums:
        part = slice(start, min(start + step, rows))
        check_finite(weights[part], name, lambda row, column: [row + start, column])
        return _quantise_block(weights[part], dtype, group_size, name, codes[part], scales[part])

    starts = range(0, rows, step)
    n_threads = min(threads or usable_cores(), len(starts))
    if n_threads <= 1:
        return codes, scales, sum(map(block, starts), ErrorSums())
    with ThreadPoolExecutor(n_threads) as pool:
        return codes, scales, sum(pool.map(block, starts), ErrorSums())


def check_finite(weights: Floats, name: str, index_of: Callable[..., list[int]] = lambda *where: [*where]) -> None:
    """Refuse NaN and infinity, naming the tensor and the first index; `index_of` makes it of an index into
    `weights`."""
    with np.errstate(invalid="ignore"):  # one pass, because NaN and infinity survive sums
        total = np.add.reduce(weights, axis=None, dtype=np.float64)
    if not np.isfinite(total):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(weights))[0])
        raise CheckpointError(
            f"The tensor {name} has the value {weights[where]} at {index_of(*where)}; weights must be finite."
        )


def _quantise_block(
    weights: Floats, dtype: str, group_size: int, name: str, codes: NDArray[np.int8], scales: NDArray[np.float16]
) -> ErrorSums:
    """Quantise some rows into `codes` and `scales`."""
    rows, cols = weights.shape
    groups = scales.shape[1]
    padded = np.zeros((rows, groups * group_size), np.float32)
    padded[:, :cols] = weights
    w = np.ascontiguousarray(padded.reshape(rows * groups, group_size).T)  # (group_size, n): each group is a column
    low, high = TYPES[dtype].grid

    largest = w[np.abs(w).argmax(axis=0), np.arange(w.shape[1])]
    start = np.divide(largest, _fan(dtype)[0], dtype=np.float32)
    if np.abs(start).max(initial=0.0) > FP16_MAX:
        raise CheckpointError(
            f"The tensor {name} has the value {float(np.abs(largest).max()):.3g}, too large for {dtype} with fp16 "
            "scales; convert with weights f32."
        )
    first = np.empty_like(w)
    scale, error = _round(w, start, low, high, first)
    max_based = float(error.sum(dtype=np.float64))
    candidate = _search(w, largest, dtype)
    q = np.empty_like(w)
    for _ in range(REFINEMENTS):
        rounded, new_error = _round(w, candidate, low, high, q)
        better = new_error < error
        np.copyto(error, new_error, where=better)
        np.copyto(scale, rounded, where=better)
        np.copyto(first, q, where=better)
        candidate = _least_squares(w, q)
    codes[:] = first.T.reshape(rows, -1)[:, :cols]
    scales[:] = scale.reshape(rows, groups)
    norm = np.einsum("gn,gn->n", w, w).sum(dtype=np.float64)
    return ErrorSums(float(error.sum(dtype=np.float64)), max_based, float(norm))


def to_halves(values: Floats) -> tuple[NDArray[np.float16], Floats]:
    """Round finite numbers up to 65504 to fp16, to the nearest and ties to even; gives fp16 and its value.

    `astype` does the same, but takes ten times as long for numbers below 2^-14, because it raises a flag for each. Here
    those get their last place, 2^-24, by adding 0.5, and all others by adding half of theirs to the bits.
    """
    bits = values.view(np.int32)
    size = bits & 0x7FFFFFFF
    normal = (size + 0xFFF + (size >> 13 & 1) >> 13) - (112 << 10)
    small = (np.minimum(np.abs(values), np.float32(2**-14)) + np.float32(0.5)).view(np.int32) - 0x3F000000
    halves = (np.maximum(normal, small) | bits >> 16 & 0x8000).astype(np.uint16)
    return halves.view(np.float16), np.take(_half_values(), halves)


@lru_cache(1)
def _half_values() -> Floats:
    """Return the values of the 65536 halves."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _fan(dtype: str) -> tuple[float, ...]:
    """Codes that the largest weight is tried on, the usual choice first."""
    ends = sorted(TYPES[dtype].grid, key=abs, reverse=True)
    return FANS.get(dtype) or tuple(end * share for share in np.linspace(1, 0.6, 16).tolist() for end in ends)


def _search(w: Floats, largest: Floats, dtype: str) -> Floats:
    """The best scale of the fan, then of its neighbours, for each column of w, refined by least squares."""
    low, high = TYPES[dtype].grid
    inverse = _inverse(largest)
    n = w.shape[1]
    best, scale, targets = np.full(n, -1.0, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    q = np.empty_like(w)

    def attempt(target: Floats | np.float32) -> None:
        np.multiply(w, inverse * target, out=q)
        np.clip(np.rint(q, out=q), low, high, out=q)
        wq, qq = np.einsum("gn,gn->n", w, q), np.einsum("gn,gn->n", q, q)
        np.maximum(qq, 1, out=qq)  # q are integers: 0 only where all are
        score = wq * (wq / qq)
        better = score > best
        np.copyto(best, score, where=better)
        np.copyto(scale, wq / qq, where=better)
        np.copyto(targets, target, where=better)

    for target in _fan(dtype):
        attempt(np.float32(target))
    centres = targets.copy()
    for offset in NEIGHBOURS.get(dtype, (-0.1, 0.1)):
        attempt(centres + np.float32(offset))
    return scale


def _round(w: Floats, scale: Floats, low: int, high: int, q: Floats) -> tuple[Floats, Floats]:
    """Round scales to fp16, choose codes (into q), and give the rounded scales and each column's squared error."""
    rounded = np.clip(scale, -FP16_MAX, FP16_MAX).astype(np.float16).astype(np.float32)
    np.multiply(w, _inverse(rounded), out=q)
    np.clip(np.rint(q, out=q), low, high, out=q)
    difference = w - q * rounded
    return rounded, np.einsum("gn,gn->n", difference, difference)


def _least_squares(w: Floats, q: Floats) -> Floats:
    return np.einsum("gn,gn->n", w, q) / np.maximum(np.einsum("gn,gn->n", q, q), 1)


def _inverse(values: Floats) -> Floats:
    """1 / values, and 0 if that is not finite (zero, or too small to invert in float32)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.divide(1, values, dtype=np.float32)
    return np.where(np.isfinite(inverse), inverse, np.float32(0))
