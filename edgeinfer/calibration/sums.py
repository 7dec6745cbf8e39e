"""Sums over the rows of a matrix's input, formed in fixed blocks: the same bits for any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import InputStatistics, one_thread

from ..base.process import usable_cores

Floats = NDArray[np.float32]
ROWS, EXPERT_ROWS = 1024, 256
"""Rows of an input that are multiplied at a time; a last batch is filled up with zeros."""
BLOCK = 512
"""Columns of a covariance that one thread computes at a time, those after them left out."""


class Sums:
    """Sums over the rows of an input; with `whole` the products of all pairs of columns too."""

    def __init__(self, width: int, whole: bool, batch: int = ROWS):
        self.tokens, self.width = 0, width
        self.largest: Floats = np.zeros(width, np.float32)
        self._squares: NDArray[np.float64] = np.zeros(width)
        self._products: Floats | None = np.zeros((width, width), np.float32) if whole else None
        self._waiting: Floats = np.zeros((batch if whole else 0, width), np.float32)
        self._filled = 0

    @staticmethod
    def nbytes(width: int, whole: bool, batch: int = ROWS) -> int:
        """Bytes that one takes, with those of a product on the way."""
        return 16 * width + (4 * width * (width + batch + BLOCK) if whole else 0)

    def add(self, rows: Floats) -> None:
        """Add rows of shape (tokens, width)."""
        self.tokens += len(rows)
        if not len(rows):
            return
        np.maximum(self.largest, np.abs(rows).max(axis=0), out=self.largest)
        self._squares += np.einsum("tc,tc->c", rows, rows, dtype=np.float64)
        if self._products is None:
            return
        while len(rows):
            n = min(len(rows), len(self._waiting) - self._filled)
            self._waiting[self._filled :][:n] = rows[:n]
            self._filled, rows = self._filled + n, rows[n:]
            if self._filled == len(self._waiting):
                self._multiply()

    def _multiply(self) -> None:
        assert self._products is not None
        self._waiting[self._filled :] = 0
        starts = range(0, self.width, BLOCK)[::-1]  # the longest first
        with one_thread(), ThreadPoolExecutor(min(usable_cores(), len(starts))) as pool:
            list(pool.map(self._add_products, starts))
        self._filled = 0

    def _add_products(self, start: int) -> None:
        assert self._products is not None
        stop = min(start + BLOCK, self.width)
        with np.errstate(over="ignore", invalid="ignore"):  # `finite` says of such values
            self._products[start:stop, :stop] += self._waiting[:, start:stop].T @ self._waiting[:, :stop]

    @property
    def finite(self) -> bool:
        """True if no value was NaN or infinite."""
        return bool(np.isfinite(self._squares).all())

    def statistics(self) -> InputStatistics:
        """Return the means; the sums are used up."""
        n = max(self.tokens, 1)
        covariance, self._products = self._products, None
        if covariance is not None:
            self._products = covariance
            if self._filled:
                self._multiply()
            self._products = None
            for start in range(0, self.width, BLOCK):
                stop = min(start + BLOCK, self.width)
                covariance[start:stop, start:stop] = np.tril(covariance[start:stop, start:stop]) \
                    + np.tril(covariance[start:stop, start:stop], -1).T
                covariance[:start, start:stop] = covariance[start:stop, :start].T
            covariance /= np.float32(n)
        return InputStatistics(self.tokens, (self._squares / n).astype(np.float32), self.largest, covariance)
