"""Layout of a head's K and V in a block of tokens, byte for byte: the specification of the kernels' stores.

A row is K or V of one token, its elements in order: floats, or codes with a scale in fp16 (two 4-bit codes per byte,
the even element in the low nibble). K is in lines: pieces of a row (`KvType.piece` bytes) of all tokens, then the next
pieces. V interleaves a few rows (`KvType.alternating`) byte by byte, so that a line holds as many tokens. Scales are
apart: those of all rows of K, then those of V.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .table import KvType

Bytes = NDArray[np.uint8]


def pack_keys(rows: NDArray[Any], kv: KvType) -> Bytes:
    """Bytes of K of blocks: elements (..., tokens, n), codes or floats, to uint8 (..., bytes)."""
    data = _bytes(rows, kv)
    return _flat(data.reshape(*data.shape[:-1], -1, kv.piece).swapaxes(-3, -2))


def unpack_keys(data: Bytes, kv: KvType, tokens: int) -> NDArray[Any]:
    """The inverse of `pack_keys`: codes as int8, floats in their own type."""
    pieces = data.reshape(*data.shape[:-1], -1, tokens, kv.piece).swapaxes(-3, -2)
    return elements(np.ascontiguousarray(pieces).reshape(*data.shape[:-1], tokens, -1), kv)


def pack_values(rows: NDArray[Any], kv: KvType) -> Bytes:
    """Bytes of V of blocks, as `pack_keys`."""
    data = _bytes(rows, kv)
    return _flat(data.reshape(*data.shape[:-2], -1, kv.alternating, data.shape[-1]).swapaxes(-2, -1))


def unpack_values(data: Bytes, kv: KvType, tokens: int) -> NDArray[Any]:
    """The inverse of `pack_values`."""
    rows = data.reshape(*data.shape[:-1], tokens // kv.alternating, -1, kv.alternating).swapaxes(-2, -1)
    return elements(np.ascontiguousarray(rows).reshape(*data.shape[:-1], tokens, -1), kv)


def packed_blocks(k: NDArray[np.float32], v: NDArray[np.float32], kv: KvType) -> list[Bytes]:
    """Planes of blocks of heads: K, V and, of codes, the scales of both.

    Parameters
    ----------
    k, v : float32 arrays of shape (heads, blocks, tokens, n)
        Of magnitudes up to `largest_value`.

    Returns
    -------
    list of uint8 arrays of shape (heads, blocks, bytes)
    """
    (k, k_scales), (v, v_scales) = elements_and_scales(k, kv), elements_and_scales(v, kv)
    scales = np.concatenate([k_scales, v_scales], axis=-1).view(np.uint8)
    return [pack_keys(k, kv), pack_values(v, kv), *([scales] if kv.scaled else [])]


def elements_and_scales(rows: NDArray[np.float32], kv: KvType) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Return elements and scales of rows (..., n): floats have none, and codes the largest magnitude by `highest`.

    Codes are of the scale as it is stored; a row whose scale is 0 in fp16 is zeros.
    """
    if not kv.scaled:
        return rows.astype(element_type(kv)), np.zeros(rows.shape[:-1], np.float16)
    scales = (np.abs(rows).max(axis=-1, initial=0) / kv.highest).astype(np.float16)
    by = scales.astype(np.float32)[..., None]
    codes = np.divide(rows, by, out=np.zeros_like(rows), where=by != 0)
    return np.rint(codes).clip(-kv.highest, kv.highest).astype(np.int8), scales


def largest_value(kv: KvType) -> float:
    """Return the largest magnitude that a row can have: that of its elements, or of its scale times its codes."""
    highest = kv.highest if kv.scaled else 1
    return highest * float(np.finfo("<f2" if kv.scaled else element_type(kv)).max)


def element_type(kv: KvType) -> str:
    """NumPy's name of an element: of codes one byte, into which smaller ones go."""
    return "<i1" if kv.scaled else f"<f{kv.bits // 8}"


def elements(data: NDArray[Any], kv: KvType) -> NDArray[Any]:
    """Elements of rows of bytes (..., bytes of a row, or of pieces of it)."""
    if kv.bits >= 8:
        return data.view(element_type(kv))
    low, high = (np.left_shift(data.view(np.int8), shift) >> 4 for shift in (4, 0))
    return np.stack([low, high], axis=-1).reshape(*data.shape[:-1], -1)


def _bytes(rows: NDArray[Any], kv: KvType) -> Bytes:
    """Rows of bytes of rows of elements."""
    stored = np.ascontiguousarray(rows, element_type(kv)).view(np.uint8)
    return stored if kv.bits >= 8 else stored[..., 0::2] & np.uint8(15) | stored[..., 1::2] << np.uint8(4)


def _flat(data: Bytes) -> Bytes:
    """Bytes of blocks whose last three axes they have been laid out by."""
    return np.ascontiguousarray(data).reshape(*data.shape[:-3], -1)
