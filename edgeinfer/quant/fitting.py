"""Scales and minima of groups by weighted least squares, for every type of codes.

Groups are columns: weights `w` and the weights of their squared errors, `by`, are arrays (columns of a group, n). A
scale is searched over a fan of candidates that put the largest weight on one level or another; for the codes q of a
candidate the best scale is <w, q> / <q, q> and explains <w, q>^2 / <q, q>, which the fan is compared by. With a
minimum, both factors are the solution of two equations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .types import WeightType

Floats = NDArray[np.float32]

FP16_MAX = 65504.0
REFINEMENTS = 2
"""Times that codes are chosen for the factors, and the factors for the codes."""
NEIGHBOURS = (-0.025, -0.0125, 0.0125, 0.0250)
"""Candidates around the best of the fan, relative to it."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55)
"""Parts of a group's range, or of its largest weight, that the levels are put over."""
_STEPS = 512


class Grid(NamedTuple):
    """Levels that a code can have, in float32."""

    low: int
    high: int
    """Lowest and highest level."""
    table: Floats | None = None
    """Level of each code; None: codes are levels."""
    codes: NDArray[np.int8] | None = None
    """Code of each half step of the range of levels."""
    steps: Floats | None = None
    """Level of each half step."""

    @classmethod
    def of(cls, stored: WeightType, levels: tuple[int, ...] = ()) -> Grid:
        """Return the levels of a type; `levels` stand for those of a tensor."""
        if table := levels or stored.table:
            return _table_grid(table)
        low, high = stored.storage.grid
        return cls(low, high)

    def nearest(self, x: Floats) -> Floats:
        """Return the nearest level of each number, as float32; `x` is overwritten."""
        if self.steps is None:
            np.rint(x, out=x)
            return np.clip(x, self.low, self.high, out=x)
        return np.take(self.steps, _half_steps(x), mode="clip")

    def codes_of(self, x: Floats) -> NDArray[np.int8]:
        """Return the codes of the nearest levels; `x` is overwritten."""
        if self.codes is None:
            return self.nearest(x).astype(np.int8)
        return np.take(self.codes, _half_steps(x), mode="clip")

    def values(self, codes: NDArray[np.int8]) -> Floats:
        """Return the levels of codes."""
        return codes.astype(np.float32) if self.table is None else self.table[codes]


def _half_steps(x: Floats) -> NDArray[np.intp]:
    """Numbers of half steps from -128 on; `x` is overwritten."""
    x *= np.float32(2)
    x += np.float32(_STEPS // 2)
    return x.astype(np.intp)


@lru_cache(64)
def _table_grid(table: tuple[int, ...]) -> Grid:
    """Middles of levels are multiples of a half: the nearest level is the same within each half step."""
    centres = (np.arange(_STEPS) + 0.5) / 2 - 128
    codes = np.abs(centres[:, None] - np.array(table)).argmin(axis=1).astype(np.int8)
    levels = np.array(table, np.float32)
    return Grid(min(table), max(table), levels, codes, levels[codes])


class Fit(NamedTuple):
    """Factors of groups, float32 of shape (n,)."""

    scale: Floats
    minimum: Floats | None = None


def inverse(values: Floats) -> Floats:
    """1 / values, and 0 if that is not finite (zero, or too small to invert in float32)."""
    with np.errstate(divide="ignore", over="ignore"):
        found = np.divide(1, values, dtype=np.float32)
    return np.where(np.isfinite(found), found, np.float32(0))


def to_fp16(values: Floats) -> Floats:
    """Round to fp16, in float32."""
    return np.clip(values, -FP16_MAX, FP16_MAX).astype(np.float16).astype(np.float32)


def fit(w: Floats, by: Floats, grid: Grid, minimum: bool, signed: bool = True, search: bool = True) -> Fit:
    """Fit the factors of groups.

    Parameters
    ----------
    w : float32 array of shape (group, n)
    by : float32 array of shape (group, n) or (group, 1)
        Weight of the squared error of each weight.
    grid : Grid
    minimum : bool
        Whether groups have a minimum, which then is at most 0 if `signed` is false.
    signed : bool
        Whether scales and minima can have either sign.
    search : bool
        Whether to look for the best factors; else they are those that put the levels over the whole range of a group.
    """
    if not search:
        return _of_range(w, grid, minimum, signed)
    return _fit_both(w, by, grid, signed) if minimum else Fit(_fit_scale(w, by, grid))


def _of_range(w: Floats, grid: Grid, minimum: bool, signed: bool) -> Fit:
    """Factors by a group's largest weight, or its least and its largest one."""
    if not minimum:
        return Fit(w[np.abs(w).argmax(axis=0), np.arange(w.shape[1])] / np.float32(max(grid.low, grid.high, key=abs)))
    least, most = w.min(axis=0), w.max(axis=0)
    if not signed:
        least = np.minimum(least, 0)
    return Fit((most - least) / np.float32(grid.high), least)


def _fit_scale(w: Floats, by: Floats, grid: Grid) -> Floats:
    largest = w[np.abs(w).argmax(axis=0), np.arange(w.shape[1])]
    unit, n = inverse(largest), w.shape[1]
    best, scale, target = np.full(n, -1, np.float32), np.zeros(n, np.float32), np.ones(n, np.float32)
    weighted = w * by

    def attempt(level: Floats | np.float32) -> None:
        q = grid.nearest(w * (unit * level))
        wq, qq = np.einsum("gn,gn->n", weighted, q), np.einsum("gn,gn,gn->n", q, q, np.broadcast_to(by, q.shape))
        found = wq * inverse(qq)
        score = wq * found
        better = score > best
        np.copyto(best, score, where=better)
        np.copyto(scale, found, where=better)
        np.copyto(target, level, where=better)

    for level in _fan(grid):
        attempt(np.float32(level))
    centre = target.copy()
    for step in NEIGHBOURS:
        attempt(centre * np.float32(1 + step))
    return scale


@lru_cache(64)
def _fan_of(low: int, high: int, fine: bool) -> tuple[float, ...]:
    ends = sorted({low, high}, key=abs, reverse=True)
    shares = np.linspace(1.1, 0.55, 12 if fine else 10).tolist() if max(-low, high) < 64 or fine else SHARES[:6]
    return tuple(end * share for share in shares for end in ends if end)


def _fan(grid: Grid) -> tuple[float, ...]:
    """Levels that the largest weight is put on."""
    return _fan_of(grid.low, grid.high, grid.table is not None)


def _fit_both(w: Floats, by: Floats, grid: Grid, signed: bool) -> Fit:
    """Scale and minimum: w ~ scale q + minimum."""
    least, most = w.min(axis=0), w.max(axis=0)
    if not signed:
        least = np.minimum(least, 0)
        most = np.maximum(most, 0)
    every = np.broadcast_to(by, w.shape)
    sums = every.sum(axis=0), np.einsum("gn,gn->n", every, w)
    n = w.shape[1]
    best, scale, minimum = np.full(n, np.inf, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    whole = np.einsum("gn,gn,gn->n", every, w, w)
    for share in SHARES:
        for up, down in ((share, share), (share, 1.0), (1.0, share)):
            if (up, down) != (share, share) and share in (1.0, *SHARES[5:]):
                continue
            low = least * np.float32(down)
            step, offset = (most * np.float32(up) - low) / np.float32(grid.high), low
            for _ in range(REFINEMENTS):
                q = grid.nearest((w - offset) * inverse(step))
                step, offset, error = _solve(w, every, q, sums, whole, signed)
                better = error < best
                np.copyto(best, error, where=better)
                np.copyto(scale, step, where=better)
                np.copyto(minimum, offset, where=better)
    return Fit(scale, minimum)


def _solve(w: Floats, by: Floats, q: Floats, sums: tuple[Floats, Floats], whole: Floats, signed: bool
           ) -> tuple[Floats, Floats, Floats]:
    """Scale and minimum for codes, and the squared error that is left."""
    total, of_w = sums
    weighted = by * q
    of_q = weighted.sum(axis=0)
    qq, wq = np.einsum("gn,gn->n", weighted, q), np.einsum("gn,gn->n", weighted, w)
    determinant = total * qq - of_q * of_q
    good = determinant > np.float32(1e-6) * total * qq
    unit = inverse(determinant)
    scale = np.where(good, (total * wq - of_q * of_w) * unit, wq * inverse(qq))
    minimum = np.where(good, (qq * of_w - of_q * wq) * unit, 0)
    if not signed:
        bad = (minimum > 0) | (scale < 0)
        scale = np.where(bad, np.maximum(wq * inverse(qq), 0), scale)
        minimum = np.where(bad, 0, minimum)
    error = whole - 2 * (scale * wq + minimum * of_w) + scale * scale * qq + minimum * minimum * total \
        + 2 * scale * minimum * of_q
    return scale.astype(np.float32), minimum.astype(np.float32), error
