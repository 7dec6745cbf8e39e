"""Values of GGUF's types in NumPy: equal to ggml's own dequantisation, bit for bit.

Blocks come as bytes (blocks, bytes of a block), values go as float32 (blocks, elements). A scale times a code is exact;
where ggml rounds (scale times code minus minimum) the same operations are done in the same order. Layouts: ggml's
ggml-common.h, ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnsupportedModelError

from .low_bits import LOW_BITS
from .low_bits import half as _half

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of E2M1, as ggml has them."""


def dequantise(blocks: Bytes, kind: str) -> Floats:
    """Return the values of blocks of one type, float32 of shape (blocks, elements).

    Raises
    ------
    UnsupportedModelError
        There is no code for this type.
    """
    if kind not in _VALUES:
        raise UnsupportedModelError(f"Tensors of the GGUF type {kind} cannot be read; supported types: "
                                    f"{', '.join(_VALUES)}.")
    with np.errstate(all="ignore"):  # the caller refuses values that are not finite
        return _VALUES[kind](blocks)


def _nibbles(codes: Bytes) -> NDArray[np.uint8]:
    """All low nibbles of each row, then all high ones."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> NDArray[np.uint8]:
    """Bit i of a 32-bit word at a byte of each block, as 16 for column i."""
    word = np.ascontiguousarray(blocks[:, at : at + 4])
    bits: NDArray[np.uint8] = np.unpackbits(word, axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)).astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _two_bits(codes: Bytes) -> NDArray[np.uint8]:
    """The four pairs of bits of 64 bytes in two halves: 128 codes from each 32 bytes, the lowest pairs first."""
    parts = codes.reshape(len(codes), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (parts & np.uint8(3)).reshape(len(codes), -1)


def _q2_k(b: Bytes) -> Floats:
    d, least = _half(b, 80), _half(b, 82)
    scales = (d * (b[:, :16] & 15))[:, :, None]
    minima = (least * (b[:, :16] >> 4))[:, :, None]
    codes = _two_bits(b[:, 16:80]).astype(np.float32).reshape(-1, 16, 16)
    return (scales * codes - minima).reshape(len(b), 256)


def _q3_k(b: Bytes) -> Floats:
    packed, d = b[:, 96:108], _half(b, 108)
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> np.uint8(shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = d * ((low | high << 4).astype(np.float32) - 32)
    third = b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit i of 32 bytes: columns 32 i on
    codes = _two_bits(b[:, 32:96]).astype(np.float32) - 4 * (third.reshape(len(b), 256) ^ 1)
    return (scales[:, :, None] * codes.reshape(-1, 16, 16)).reshape(len(b), 256)


def _scales_and_minima(b: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 groups of Q4_K and Q5_K, of 6 bits each times two fp16 numbers."""
    low, middle, top = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (top & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([middle & 63, (top >> 4) | (middle >> 6) << 4], axis=1)
    return (_half(b, 0) * scales)[:, :, None], (_half(b, 2) * minima)[:, :, None]


def _q4_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b)
    codes = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scales * codes - minima).reshape(len(b), 256)


def _q5_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b)
    fifth = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << np.uint8(4)
    return (scales * codes - minima).reshape(len(b), 256)


def _q6_k(b: Bytes) -> Floats:
    halves = b[:, :128].reshape(-1, 2, 64)
    low = np.stack([halves & 15, halves >> 4], axis=2).reshape(len(b), 256)
    codes = (low | _two_bits(b[:, 128:192]) << 4).astype(np.float32) - 32
    scales = _half(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return (scales[:, :, None] * codes.reshape(-1, 16, 16)).reshape(len(b), 256)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * IQ4_LEVELS[_nibbles(b[:, 2:])]


def _iq4_xs(b: Bytes) -> Floats:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = _half(b, 0) * ((low | high << 4).astype(np.float32) - 32)
    codes = _nibbles(b[:, 8:].reshape(-1, 8, 16))
    return (scales[:, :, None] * IQ4_LEVELS[codes]).reshape(len(b), 256)


def _mxfp4(b: Bytes) -> Floats:
    exponent = b[:, :1].astype(np.uint32)
    scale = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << np.uint32(23))
    return scale.astype(np.uint32).view(np.float32) * MXFP4_LEVELS[_nibbles(b[:, 1:])]


def _bf16(b: Bytes) -> Floats:
    return (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _floats(form: str) -> Callable[[Bytes], Floats]:
    return lambda b: np.ascontiguousarray(b).view(form).astype(np.float32)


_VALUES: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _floats("<f4"), "F16": _floats("<f2"), "BF16": _bf16, "F64": _floats("<f8"), "Q4_0": _q4_0, "Q4_1": _q4_1,
    "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, **LOW_BITS,
}
