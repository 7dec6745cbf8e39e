"""Statistics of a matrix's inputs over a text: what the rounding of its weights is judged by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..base.dataclass import dataclass


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
