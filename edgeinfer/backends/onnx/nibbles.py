"""Matrices of 8 bits as two of 4 bits, for which onnxruntime's CPU provider has kernels.

It writes a matrix of 8 bits out in f32 for every call: 113 MB for the head of SmolLM2 135M, which took half of the time
of a token, and blocks of the heap that stayed when they were freed (1.32.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .weights import Quantised, Reader, Stored, computed


def nibbles(matrix: Quantised, dtype: str) -> tuple[Quantised, Quantised, Stored]:
    """A matrix of 8 bits as two of 4 bits whose products add up to its own, and the zero points of the second.

    A code less 128 is 16 (high - 8) + low, and low has the zero point 0.
    """
    rows, groups, group = matrix.codes.shape

    def half(shift: int) -> Callable[[Reader], Iterator[NDArray[Any]]]:
        def pieces(read: Reader) -> Iterator[NDArray[Any]]:
            for codes in matrix.codes.pieces(read):
                values = codes >> shift & 15
                yield values[..., 0::2] | values[..., 1::2] << 4
        return pieces

    high, low = (Stored(f"{matrix.codes.name}.{name}", "u8", (rows, groups, group // 2), half(shift))
                 for name, shift in (("high", 4), ("low", 0)))
    scales = Stored(f"{matrix.scales.name}.high", dtype, matrix.scales.shape,
                    lambda read: (16 * piece.astype(np.float32) for piece in matrix.scales.pieces(read)))
    zeros = (rows, -(-groups // 2))
    return (Quantised(high, scales, 4, matrix.group_size), Quantised(low, matrix.scales, 4, matrix.group_size),
            computed(f"zeros.{rows}.{zeros[1]}", "u8", zeros, lambda: np.zeros(zeros, np.uint8)))
