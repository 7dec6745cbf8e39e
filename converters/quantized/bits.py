"""Codes of 2 to 8 bits as they are packed into words, and floats of 4 and 8 bits."""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Position in a word of AutoAWQ, lowest bits first, of each of the 8 outputs that it holds."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the codes of MXFP4 (OCP Microscaling Formats 1.0, table 5)."""


def unpacked(words: NDArray[np.uint32], bits: int) -> Bytes:
    """Codes of words (..., n) along the last axis, the lowest bits first: uint8 of shape (..., n x 32 / bits)."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    return raw if bits == 8 else nibbles(raw) if bits == 4 else _bit_stream(raw, bits)


def _bit_stream(raw: Bytes, bits: int) -> Bytes:
    """Codes packed contiguously across byte boundaries, as MLX writes 3, 5 and 6 bits; of 2 bits four in a byte."""
    nbytes = lcm(bits, 8) // 8  # in which whole codes are
    runs = raw.reshape(*raw.shape[:-1], -1, nbytes)
    words = np.zeros(runs.shape[:-1], np.uint64)
    for i in range(nbytes):
        words |= runs[..., i].astype(np.uint64) << np.uint64(8 * i)
    shifts = np.arange(0, 8 * nbytes, bits, dtype=np.uint64)
    codes = (words[..., None] >> shifts & np.uint64((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(*raw.shape[:-1], -1)


def nibbles(raw: Bytes) -> Bytes:
    """Codes of 4 bits along the last axis, the lower half of each byte first."""
    pairs = np.ascontiguousarray(raw).astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)


def signed(codes: Bytes, bits: int) -> NDArray[np.int8]:
    """Codes less half of their range."""
    return (codes - np.uint8(1 << bits - 1)).view(np.int8)


def _e4m3() -> NDArray[np.float32]:
    """Values of the 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN, none infinite."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    values[(code & 127) == 127] = np.nan
    return np.where(code < 128, values, -values).astype(np.float32)


E4M3: NDArray[Any] = _e4m3()
"""Values of OCP's 8-bit float E4M3, of NVIDIA's and torch's ``float8_e4m3fn`` (arXiv 2209.05433)."""
