"""Statistics of a matrix's inputs over a text, by which the rounding of its weights is judged."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.dataclass import dataclass
from .blas import one_thread

WIDE = 4096
"""Columns beyond which C is factored in float32, for its size."""
DAMPING = 0.01
"""Share of the mean of C's diagonal that is added to it."""


class Feedback(NamedTuple):
    """Factors by which columns pass on their rest (rounding.py)."""

    matrix: NDArray[np.float32]
    """R with each column divided by its diagonal element, of shape (cols, cols)."""
    by: NDArray[np.float32]
    """R_jj^2 over their mean: the weight of the squared error that is left at column j."""
    scale: float
    """This mean."""
    damping: float
    """The value added to each element of C's diagonal."""


@dataclass(frozen=True)
class InputStatistics:
    """Sums over the tokens that a matrix multiplied: of an expert, over those that chose it."""

    tokens: int
    """Tokens that were counted."""
    mean_square: NDArray[np.float32]
    """Mean of x^2 of each column, of shape (cols,); an importance matrix holds just this."""
    largest: NDArray[np.float32] | None = None
    """Largest magnitude of each column, of shape (cols,)."""
    covariance: NDArray[np.float32] | None = None
    """Mean of x x^T, not centred, of shape (cols, cols): the squared error of a row is dw C dw^T."""

    @cached_property
    def feedback(self) -> Feedback | None:
        """R of C = R R^T, upper triangular; None if C is not positive definite in spite of the damping."""
        if self.covariance is None:
            return None
        wide = len(self.covariance) > WIDE
        flipped: NDArray[Any] = np.array(self.covariance[::-1, ::-1], np.float32 if wide else np.float64)
        mean = float(np.trace(flipped, dtype=np.float64)) / len(flipped)
        if not np.isfinite(mean) or mean <= 0:
            return None
        damping = DAMPING * mean
        flipped[np.diag_indices_from(flipped)] += damping
        try:
            with one_thread():
                flipped = np.linalg.cholesky(flipped)
        except np.linalg.LinAlgError:
            return None
        diagonal = np.diagonal(flipped)[::-1].copy()
        by = np.square(diagonal, dtype=np.float64)
        flipped /= diagonal[::-1]
        matrix = np.ascontiguousarray(flipped[::-1, ::-1], np.float32)
        if not np.isfinite(matrix).all():
            return None
        return Feedback(matrix, (by / by.mean()).astype(np.float32), float(by.mean()), damping)

    def error_of(self, difference: NDArray[np.float32]) -> float:
        """Return the squared error of the outputs of rows with these errors: of all together, mean of a token.

        Without a covariance columns count their mean squares alone.
        """
        if self.covariance is None:
            return float((np.square(difference).sum(axis=0, dtype=np.float64) * self.mean_square).sum())
        with one_thread():
            return float(np.einsum("rc,rc->", difference @ self.covariance, difference))
