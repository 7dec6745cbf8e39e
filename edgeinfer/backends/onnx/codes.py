"""Stored weights to the tensors of onnxruntime's operators, codes and scales unchanged; in NumPy, some rows at a time.

MatMulNBits and GatherBlockQuantized take for each row and group of columns the codes plus half their range (q4: 8,
int8: 128), in the order of the columns, q4 two to a byte with the even column in the low nibble, and one scale; without
zero points they subtract the half again. `edgeinfer.quant.layouts` says how bundles store the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import LINE_BYTES, TILE_ROWS, WeightType

Bytes = NDArray[np.uint8]


def tile_codes(tiles: Bytes, stored: WeightType, columns: int) -> Bytes:
    """Codes of whole tiles of 16 rows, rows of padding included.

    Parameters
    ----------
    tiles : uint8 array of shape (tiles, WeightType.tile_bytes(columns))
    stored : WeightType
        q4 or int8 in layout tile16.
    columns : int

    Returns
    -------
    uint8 array of shape (16 tiles, groups, group_size x bits / 8)
    """
    n, records = len(tiles), stored.tile_records(columns)
    lines = np.ascontiguousarray(tiles.reshape(n, records, -1)[:, :, :-LINE_BYTES])
    words = lines.view("<u4").reshape(n, records, -1, TILE_ROWS)
    words = _next_to_each_other(words) if stored.storage.bits == 4 else words ^ np.uint32(0x80808080)
    rows = np.ascontiguousarray(words.transpose(0, 3, 1, 2)).view(np.uint8).reshape(n * TILE_ROWS, 2 * records, -1)
    return rows[:, : -(-columns // stored.group_size)]


def tile_scales(tiles: Bytes, stored: WeightType, columns: int) -> NDArray[np.float16]:
    """As `tile_codes`, the scales: float16 (16 tiles, groups)."""
    n, records = len(tiles), stored.tile_records(columns)
    lines = np.ascontiguousarray(tiles.reshape(n, records, -1)[:, :, -LINE_BYTES:])
    scales = lines.view("<f2").reshape(n, records, 2, TILE_ROWS).transpose(0, 3, 1, 2)
    return scales.reshape(n * TILE_ROWS, 2 * records)[:, : -(-columns // stored.group_size)]


def _next_to_each_other(words: NDArray[Any]) -> NDArray[Any]:
    """Nibbles of 8 columns in order: a word holds the first four in its low nibbles, the others in the high."""
    low, high = words & np.uint32(0x0F0F0F0F), words >> np.uint32(4) & np.uint32(0x0F0F0F0F)
    for part in (low, high):  # in place: these are the largest arrays that there are
        part |= part >> np.uint32(4)
        part &= np.uint32(0x00FF00FF)
        part |= part >> np.uint32(8)
        part &= np.uint32(0xFFFF)
    high <<= np.uint32(16)
    low |= high
    return low


def part_codes(parts: Bytes, stored: WeightType, hidden: int) -> Bytes:
    """Codes of parts of neurons, uint8 (n, WeightType.part_bytes(hidden)): uint8 (n, groups, bytes of a group)."""
    n, groups = len(parts), -(-hidden // stored.group_size)
    codes = parts[:, : groups * stored.group_size * stored.storage.bits // 8].reshape(n, groups, -1)
    if stored.storage.bits == 8:
        return codes ^ np.uint8(0x80)
    halves = np.concatenate([codes & 15, codes >> 4], axis=2)  # a group's first half was in the low nibbles
    return halves[:, :, 0::2] | halves[:, :, 1::2] << np.uint8(4)


def part_scales(parts: Bytes, stored: WeightType, hidden: int) -> NDArray[np.float16]:
    """As `part_codes`, the scales: float16 (n, groups)."""
    groups = -(-hidden // stored.group_size)
    end = groups * stored.group_size * stored.storage.bits // 8
    return np.ascontiguousarray(parts[:, end : end + 2 * groups]).view("<f2")


def part_values(parts: Bytes, stored: WeightType, hidden: int) -> NDArray[np.float32]:
    """The weights that parts of neurons stand for: float32 (n, hidden)."""
    codes, half = part_codes(parts, stored, hidden), 1 << stored.storage.bits - 1
    if stored.storage.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=3).reshape(*codes.shape[:2], -1)
    values = codes.astype(np.float32) - np.float32(half)
    values *= part_scales(parts, stored, hidden)[:, :, None]
    return values.reshape(len(parts), -1)[:, :hidden]


def dense_columns(tiles: Bytes, stored: WeightType, columns: int, first: int, last: int) -> NDArray[Any]:
    """Columns `first` to `last` - 1 of an f16 or f32 matrix, one after the other: (columns, rows of all tiles)."""
    kind = np.dtype(f"<f{stored.storage.bits // 8}")
    values = tiles.view(kind).reshape(len(tiles), stored.padded_columns(columns), TILE_ROWS)
    return values[:, first:last].transpose(1, 0, 2).reshape(last - first, -1)
