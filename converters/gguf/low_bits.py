"""Values of GGUF's types below 4 bits and of NVFP4 in NumPy, bit for bit those of ggml's own dequantisation.

IQ1 to IQ3 store indices into code books of 4 or 8 levels each, which ggml's ggml-common.h lists; `grids.npz` has them
(made by tests/make_gguf_grids.py). Every product here is exact in float32, so the order of factors does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GRIDS = Path(__file__).with_name("grids.npz")
_EIGHT = np.arange(8, dtype=np.uint8)
_DELTA = np.float32(0.125)
_FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def half(blocks: Bytes, at: int) -> Floats:
    """The fp16 number at a byte of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


@lru_cache(1)
def _grids() -> dict[str, Floats]:
    """Levels by type, (indices, 4 or 8)."""
    with np.load(GRIDS) as stored:
        return {kind: stored[kind].astype(np.float32) for kind in stored.files}


@lru_cache(1)
def _signs() -> Floats:
    """Return the signs for each value of 8 sign bits, (256, 8)."""
    return 1 - 2 * (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


@lru_cache(1)
def _even_signs() -> Floats:
    """Return the signs for each value of 7 sign bits; the eighth makes the number of negative ones even, (128, 8)."""
    signs = _signs()[:128].copy()
    signs[:, 7] = signs[:, :7].prod(axis=1)
    return signs


def _words(blocks: Bytes, at: int, stop: int, form: str) -> NDArray[np.uint32]:
    """Bytes of each block as little-endian words, widened."""
    return np.ascontiguousarray(blocks[:, at:stop]).view(form).astype(np.uint32)


def _scaled(scales: Floats, levels: Floats) -> Floats:
    """Scales (blocks, groups) times levels of their groups, (blocks, elements)."""
    n, groups = scales.shape
    return (scales[:, :, None] * levels.reshape(n, groups, -1)).reshape(n, -1)


def _nibble_scales(scales: Bytes) -> Floats:
    """The 4-bit numbers of bytes, low ones first."""
    return np.stack([scales & 15, scales >> 4], axis=2).reshape(len(scales), -1).astype(np.float32)


# -- IQ2, IQ3 ----------------------------------------------------------------------------------------------------------


def _iq2_xxs(b: Bytes) -> Floats:
    """Dequantise IQ2_XXS: for 32 columns four indices of a byte, then four times 7 sign bits and a scale of 4 bits in a
    word."""
    words = _words(b, 2, 66, "<u4").reshape(len(b), 8, 2)
    indices = np.ascontiguousarray(words[:, :, :1]).view(np.uint8)
    signs = words[:, :, 1:] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    scales = half(b, 0) * (np.float32(0.5) + (words[:, :, 1] >> np.uint32(28)).astype(np.float32)) * np.float32(0.25)
    return _scaled(scales, _grids()["IQ2_XXS"][indices] * _even_signs()[signs])


def _iq2_xs(b: Bytes) -> Floats:
    """Dequantise IQ2_XS: for 8 columns an index of 9 bits and 7 sign bits; scales of 4 bits for 16."""
    codes = _words(b, 2, 66, "<u2")
    scales = half(b, 0) * (np.float32(0.5) + _nibble_scales(b[:, 66:])) * np.float32(0.25)
    return _scaled(scales, _grids()["IQ2_XS"][codes & 511] * _even_signs()[codes >> 9])


def _iq2_s(b: Bytes) -> Floats:
    """Dequantise IQ2_S: for 8 columns an index of 8 + 2 bits and 8 sign bits; scales of 4 bits for 16."""
    further = b[:, 66:74, None] >> _EIGHT[:8:2] & 3
    indices = b[:, 2:34] | further.reshape(len(b), 32).astype(np.uint16) << 8
    scales = half(b, 0) * (np.float32(0.5) + _nibble_scales(b[:, 74:])) * np.float32(0.25)
    return _scaled(scales, _grids()["IQ2_S"][indices] * _signs()[b[:, 34:66]])


def _iq3_xxs(b: Bytes) -> Floats:
    """Dequantise IQ3_XXS: for 4 columns an index of a byte; for 32 a word as in IQ2_XXS."""
    words = _words(b, 66, 98, "<u4")
    signs = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    scales = half(b, 0) * (np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32)) * np.float32(0.5)
    levels = _grids()["IQ3_XXS"][b[:, 2:66]].reshape(len(b), 256)
    return _scaled(scales, levels * _even_signs()[signs].reshape(len(b), 256))


def _iq3_s(b: Bytes) -> Floats:
    """Dequantise IQ3_S: for 4 columns an index of 8 + 1 bits; 8 sign bits for 8; scales of 4 bits for 32."""
    further = b[:, 66:74, None] >> _EIGHT & 1
    indices = b[:, 2:66] | further.reshape(len(b), 64).astype(np.uint16) << 8
    levels = _grids()["IQ3_S"][indices].reshape(len(b), 256)
    return _scaled(half(b, 0) * (1 + 2 * _nibble_scales(b[:, 106:])), levels * _signs()[b[:, 74:106]].reshape(-1, 256))


# -- IQ1 ---------------------------------------------------------------------------------------------------------------


def _iq1_s(b: Bytes) -> Floats:
    """Dequantise IQ1_S: for 8 columns an index of 8 + 3 bits; for 32 a scale of 3 bits, and the sign of an added
    eighth."""
    high = _words(b, 34, 50, "<u2")
    further = high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7
    indices = b[:, 2:34] | further.reshape(len(b), 32) << 8
    delta = np.where(high >> 15, -_DELTA, _DELTA)[:, :, None, None]
    levels = _grids()["IQ1_S"][indices].reshape(len(b), 8, 4, 8) + delta
    return _scaled(half(b, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32), levels)


def _iq1_m(b: Bytes) -> Floats:
    """Dequantise IQ1_M: as IQ1_S, but signs of the eighth for 8 columns, scales for 16, an fp16 number in four top
    nibbles."""
    words = _words(b, 48, 56, "<u2")
    outer = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint32), axis=1)
    scales = (2 * (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7) + 1).reshape(len(b), 16)
    high = np.stack([b[:, 32:48] & 15, b[:, 32:48] >> 4], axis=2).reshape(len(b), 32)
    indices = b[:, :32] | (high & 7).astype(np.uint16) << 8
    levels = _grids()["IQ1_S"][indices] + np.where(high & 8, -_DELTA, _DELTA)[:, :, None]
    return _scaled(outer.astype(np.uint16).view(np.float16).astype(np.float32)[:, None] * scales.astype(np.float32),
                   levels)


# -- signs, ternary codes, 4-bit floats --------------------------------------------------------------------------------


def ternary_codes(b: Bytes, kind: str) -> NDArray[np.int8]:
    """Codes of Q1_0 (-1 and 1), and of TQ1_0, TQ2_0 and Q2_0 (-1 to 1, or 2), (blocks, elements)."""
    if kind == "Q1_0":
        bits: Bytes = np.unpackbits(b[:, 2:], axis=1, bitorder="little")
        return (2 * bits).view(np.int8) - np.int8(1)
    if kind == "Q2_0":
        return (b[:, 2:, None] >> _EIGHT[:8:2] & 3).reshape(len(b), 64).view(np.int8) - np.int8(1)
    if kind == "TQ2_0":
        pairs = b[:, :64].reshape(len(b), 2, 1, 32) >> _EIGHT[:8:2, None] & 3
        return pairs.reshape(len(b), 256).view(np.int8) - np.int8(1)
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]  # products wrap: the rest has the next digit on top
    digits = np.concatenate([(part[:, None] * powers[:n]).reshape(len(b), -1)
                             for part, n in ((b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4))], axis=1)
    return (digits.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)


def ternary_scale(kind: str) -> int:
    """The byte of a block at which its scale is."""
    return {"Q1_0": 0, "Q2_0": 0, "TQ1_0": 52, "TQ2_0": 64}[kind]


def _ternary(kind: str) -> Callable[[Bytes], Floats]:
    return lambda b: half(b, ternary_scale(kind)) * ternary_codes(b, kind).astype(np.float32)


def _nvfp4(b: Bytes) -> Floats:
    """Four groups of 16 in bytes of two nibbles; scales are floats of 4 + 3 bits without a sign (0x7F is 0, here)."""
    exponent, fraction = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    scales = np.where(exponent, np.ldexp(8 + fraction, exponent - 11), np.ldexp(fraction, -10))
    scales = np.where(b[:, :4] == 0x7F, np.float32(0), scales)
    codes = b[:, 4:].reshape(len(b), 4, 8)
    return _scaled(scales.astype(np.float32), _FP4_LEVELS[np.concatenate([codes & 15, codes >> 4], axis=2)])


LOW_BITS: dict[str, Callable[[Bytes], Floats]] = {
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s, "NVFP4": _nvfp4, **{kind: _ternary(kind) for kind in ("Q1_0", "Q2_0", "TQ1_0", "TQ2_0")},
}
"""Functions by type: blocks as bytes to their values, (blocks, elements)."""
