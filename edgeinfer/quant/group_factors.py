"""Factors of the groups of some rows while their codes are chosen: fp16, or 8 bits times an fp16 number of 256 columns.

Weights are transposed, (columns, rows): each group of columns of a row is a column, as `fitting` takes them.
"""

from __future__ import annotations

import numpy as np

from . import fitting
from .fitting import Fit, Floats, Grid, inverse, to_fp16
from .packed import Factors
from .table import SUPER_COLUMNS
from .types import WeightType

EXTREMES = {"u8*f16": (0, 255), "i8*f16": (-127, 127)}


class GroupFactors:
    """Factors of all groups of `rows` rows, group by group; a nested type's outer ones for each 256 columns.

    Parameters
    ----------
    stored : WeightType
    grid : Grid
    rows, cols : int
    search : bool
        As in `fitting.fit`.
    """

    def __init__(self, stored: WeightType, grid: Grid, rows: int, cols: int, search: bool = True):
        self.stored, self.grid, self.rows, self._search = stored, grid, rows, search
        row, groups = stored.storage, -(-cols // stored.group_size)
        inner = {"f16": np.float16, "u8*f16": np.uint8, "i8*f16": np.int8}[row.scale]
        self._inner = [np.zeros((groups, rows), inner) for _ in range(row.factors)]
        self._outer = [np.zeros((-(-cols // SUPER_COLUMNS), rows), np.float16)
                       for _ in range(row.factors if row.nested else 0)]

    def begin(self, start: int, w: Floats, by: Floats) -> None:
        """Choose the outer factors of the 256 columns that begin at `start`, from the part of them that is left to
        round."""
        row, group = self.stored.storage, self.stored.group_size
        if not row.nested:
            return
        found = [self._fit(w[at : at + group], by[at : at + group]) for at in range(0, len(w), group)]
        most = EXTREMES[row.scale][1]
        for i, outer in enumerate(self._outer):
            parts = np.array([fit[i] for fit in found], np.float32)
            largest = parts[np.abs(parts).argmax(axis=0), np.arange(self.rows)]
            outer[start // SUPER_COLUMNS] = to_fp16(largest / np.float32(most))

    def choose(self, number: int, w: Floats, by: Floats) -> Fit:
        """Choose the factors of a group from its weights, and return them as they are stored."""
        row, found = self.stored.storage, self._fit(w, by)
        if not row.nested:
            for part, values in zip(self._inner, found, strict=False):
                part[number] = to_fp16(values)  # type: ignore[arg-type]
        else:
            self._choose_inner(number, found, w, by)
        return self.of(number)

    def _choose_inner(self, number: int, found: Fit, w: Floats, by: Floats) -> None:
        """Round the factors to multiples of the outer ones: the scale first, then the minimum that suits it."""
        low, high = EXTREMES[self.stored.storage.scale]
        units = [inverse(outer[number * self.stored.group_size // SUPER_COLUMNS].astype(np.float32))
                 for outer in self._outer]
        inner = np.clip(np.rint(found.scale * units[0]), low, high)
        self._inner[0][number] = inner
        if found.minimum is None:
            return
        scale = self.of(number).scale
        codes = self.grid.nearest((w - found.minimum) * inverse(scale))
        every = np.broadcast_to(by, w.shape)
        minimum = np.einsum("gn,gn->n", every, w - codes * scale) / np.maximum(every.sum(axis=0), np.float32(1e-30))
        self._inner[1][number] = np.clip(np.rint(minimum * units[1]), low, high)

    def _fit(self, w: Floats, by: Floats) -> Fit:
        row = self.stored.storage
        return fitting.fit(w, by, self.grid, row.minimum, signed=row.scale != "u8*f16", search=self._search)

    def of(self, number: int) -> Fit:
        """Return the factors of a group."""
        values = [part[number].astype(np.float32) for part in self._inner]
        if self._outer:
            at = number * self.stored.group_size // SUPER_COLUMNS
            values = [value * outer[at].astype(np.float32) for value, outer in zip(values, self._outer, strict=True)]
        return Fit(*values)

    def finished(self) -> Factors:
        """Return the factors by rows."""
        parts = [np.ascontiguousarray(part.T) for part in (*self._inner, *self._outer)]
        return Factors(parts[0], *parts[1:]) if self.stored.storage.minimum else Factors(parts[0], None, *parts[1:])
