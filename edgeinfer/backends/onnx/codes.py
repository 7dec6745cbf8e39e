"""Stored weights to the tensors of onnxruntime's operators, codes and scales unchanged; in NumPy, some rows at a time.

MatMulNBits and GatherBlockQuantized take for each row and group of columns the codes plus half their range (q4: 8,
int8: 128), in the order of the columns, q4 two to a byte with the even column in the low nibble, and one scale; without
zero points they subtract the half again. `edgeinfer.quant.layouts` says how bundles store the same.

Other types become such blocks as well. Codes of 4 bits on a uniform grid stay 4 bits, all others are levels in 8. A
block whose weights have a minimum is (level - middle) scale + offset, and the offsets' part of a product is the sum of
the block's inputs times its offset: a second, small matmul. So no operator needs zero points that are not integers,
which onnxruntime does not take for 8 bits, and which keep CUDA from its fast matmuls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import LINE_BYTES, SUPER_COLUMNS, TILE_ROWS, WeightType, layouts, packed

Bytes = NDArray[np.uint8]


class Blocks(NamedTuple):
    """Rows of a matrix as blocks of onnxruntime's operators."""

    codes: Bytes
    """(rows, groups, bytes of a group)."""
    scales: NDArray[Any]
    """(rows, groups)."""
    offsets: NDArray[np.float32] | None = None
    """(rows, groups), of types with minima."""


def code_bits(stored: WeightType) -> int:
    """Return the bits of the codes that a type becomes."""
    return 4 if stored.storage.bits == 4 and stored.storage.grid else 8


def tile_blocks(tiles: Bytes, stored: WeightType, columns: int) -> Blocks:
    """Codes, scales and offsets of whole tiles of 16 rows, rows of padding included.

    Parameters
    ----------
    tiles : uint8 array of shape (tiles, WeightType.tile_bytes(columns))
    stored : WeightType
        Any quantised type in layout tile16.
    columns : int
    """
    if stored.storage.simple and code_bits(stored) == stored.storage.bits:
        return Blocks(tile_codes(tiles, stored, columns), tile_scales(tiles, stored, columns))
    row, bits, group = stored.storage, code_bits(stored), stored.group_size
    codes, factors = packed.unpack(tiles.reshape(-1), stored, (len(tiles) * TILE_ROWS, columns))
    levels = np.array(stored.table, np.int16)[codes] if row.indexed else codes.astype(np.int16)
    middle = (row.grid[1] + 1) // 2 if row.minimum else 0
    blocks = -(-columns // group)
    whole = np.full((len(levels), blocks * group), 1 << bits - 1, np.uint8)
    whole[:, :columns] = levels - middle + (1 << bits - 1)
    if bits == 4:
        whole = whole[:, 0::2] | whole[:, 1::2] << np.uint8(4)
    scales, offsets = _whole_factor(factors.scales, factors.outer, group), None
    if factors.minima is not None:
        offsets = _whole_factor(factors.minima, factors.outer_minima, group) + np.float32(middle) * scales
    return Blocks(whole.reshape(len(levels), blocks, -1), scales, offsets)


def _whole_factor(inner: NDArray[Any], outer: NDArray[np.float16] | None, group: int) -> NDArray[np.float32]:
    """Factors of blocks, of nested ones the products, which are exact in float32."""
    whole = inner.astype(np.float32)
    if outer is not None:
        whole *= np.repeat(outer.astype(np.float32), SUPER_COLUMNS // group, axis=1)[:, : whole.shape[1]]
    return whole


def tile_values(tiles: Bytes, stored: WeightType, columns: int) -> NDArray[np.float32]:
    """The weights of whole tiles of any type: float32 (16 tiles, columns)."""
    shape = (len(tiles) * TILE_ROWS, columns)
    return layouts.unpack_tile16(tiles.reshape(-1), stored.dtype, stored.group_size, shape, stored.levels)


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
    """Return the scales that belong to `tile_codes`: float16 (16 tiles, groups)."""
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
    if stored.storage.bits == 2:
        pieces = np.concatenate([codes >> np.uint8(shift) & np.uint8(3) for shift in range(0, 8, 2)], axis=2)
        return pieces + np.uint8(0x80 - stored.storage.offset)
    halves = np.concatenate([codes & 15, codes >> 4], axis=2)  # a group's first half was in the low nibbles
    return halves[:, :, 0::2] | halves[:, :, 1::2] << np.uint8(4)


def part_scales(parts: Bytes, stored: WeightType, hidden: int) -> NDArray[np.float16]:
    """Return the scales that belong to `part_codes`: float16 (n, groups)."""
    groups = -(-hidden // stored.group_size)
    end = groups * stored.group_size * stored.storage.bits // 8
    return np.ascontiguousarray(parts[:, end : end + 2 * groups]).view("<f2")


def part_values(parts: Bytes, stored: WeightType, hidden: int) -> NDArray[np.float32]:
    """The weights that parts of neurons stand for: float32 (n, hidden)."""
    codes, half = part_codes(parts, stored, hidden), 1 << code_bits(stored) - 1
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
