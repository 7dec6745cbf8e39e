"""Layout tile16 of codes of 4 to 6 bits with any factors: the specification of what other formats' types become.

As q4 (`layouts.py`), but for this. Codes are stored as level - lowest level, or as places in the type's table.
Steps of 4 columns go in runs: of a run's steps the even ones fill low nibbles and the odd ones high nibbles of its
lines, and where codes have more than 4 bits, one line behind these has the others: of step s of the run, bits b s to
b s + b - 1 of each byte, b = bits - 4. A run has 2 steps, with a fifth bit 8, with two more bits 4.

Behind the codes of all groups of a record come its factors, each for 16 rows:

* fp16: as in q4 a line of 2 x 16 scales, then, with minima, one of 2 x 16 minima;
* 8 bits x fp16 of 256 columns, which are the record: 16 bytes of scales for each group, then as many of minima, then a
  line with 16 outer scales and 16 outer minima (zeros without minima).

A weight is level x scale + minimum, of nested factors level x (outer x scale) + (outer minimum x minimum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .types import LINE_BYTES, SUPER_COLUMNS, TILE_ROWS, StorageType, WeightType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
_LOW = np.uint32(0x0F0F0F0F)


class Factors(NamedTuple):
    """What codes are multiplied by, and what is added: arrays (rows, groups), outer ones (rows, columns / 256)."""

    scales: NDArray
    """float16; of nested factors uint8 or int8, as the type says."""
    minima: NDArray | None = None
    outer: NDArray[np.float16] | None = None
    outer_minima: NDArray[np.float16] | None = None


def run_lines(row: StorageType) -> tuple[int, int]:
    """Lines of nibbles in a run, and lines of further bits."""
    return (1, 0) if row.bits == 4 else (4 // (row.bits - 4), 1)


def pack(codes: NDArray[np.int8], stored: WeightType, factors: Factors) -> Bytes:
    """Bytes of a matrix (rows, cols) of levels, or of places in the type's table."""
    (rows, cols), row = codes.shape, stored.storage
    n_tiles, n_records, width = -(-rows // TILE_ROWS), stored.tile_records(cols), stored.padded_columns(cols)
    padded = np.zeros((n_tiles * TILE_ROWS, width), np.uint8)
    padded[:rows, :cols] = codes.view(np.uint8) + np.uint8(row.offset)
    padded[:rows, cols : -(-cols // stored.group_size) * stored.group_size] = row.offset
    out = np.zeros((n_tiles, n_records, stored.record_bytes), np.uint8)
    lines = _lines(padded.view(np.uint32).reshape(n_tiles, TILE_ROWS, -1), row)
    place_lines(out, lines)
    at = 16 * (width // n_records) * row.bits // 8
    for part, each in _in_order(factors, row):
        whole = np.zeros((n_tiles * TILE_ROWS, n_records * each), part.dtype)
        whole[:rows, : part.shape[1]] = part
        at = place_factors(out, whole.reshape(n_tiles, TILE_ROWS, -1), at)
    return out.reshape(-1)


def place_lines(out: Bytes, lines: Words) -> None:
    """Put words (tiles, 16, lines) at the beginning of records (tiles, records, bytes)."""
    n_tiles, n_records, _ = out.shape
    words = lines.reshape(n_tiles, TILE_ROWS, n_records, -1)
    room = out.view(np.uint32).reshape(n_tiles, n_records, -1, TILE_ROWS)
    room[:, :, : words.shape[3]] = words.transpose(0, 2, 3, 1)


def place_factors(out: Bytes, values: NDArray, at: int) -> int:
    """Put factors (tiles, 16, records x n) at byte `at` of records (tiles, records, bytes); gives where they end."""
    n_tiles, n_records, _ = out.shape
    ordered = values.reshape(n_tiles, TILE_ROWS, n_records, -1).transpose(0, 2, 3, 1)
    data = np.ascontiguousarray(ordered).reshape(n_tiles, n_records, -1).view(np.uint8)
    out[:, :, at : at + data.shape[2]] = data
    return at + int(data.shape[2])


def unpack(data: Bytes, stored: WeightType, shape: tuple[int, int]) -> tuple[NDArray[np.int8], Factors]:
    """The inverse of `pack`."""
    (rows, cols), row = shape, stored.storage
    n_tiles, n_records = -(-rows // TILE_ROWS), stored.tile_records(cols)
    records = data.reshape(n_tiles, n_records, -1)
    code_bytes = 16 * (stored.padded_columns(cols) // n_records) * row.bits // 8
    lines = np.ascontiguousarray(records[:, :, :code_bytes]).view(np.uint32)
    lines = lines.reshape(n_tiles, -1, TILE_ROWS).transpose(0, 2, 1)
    steps = _steps(np.ascontiguousarray(lines), row)
    codes = steps.view(np.uint8).reshape(n_tiles * TILE_ROWS, -1)[:rows, :cols] - np.uint8(row.offset)
    at = code_bytes
    found: list[NDArray[Any]] = []
    inner, outer = _kinds(row)
    for kind, each in [(inner, row.record_groups)] * row.factors + [(outer, 1)] * (row.factors if row.nested else 0):
        size = TILE_ROWS * each * np.dtype(kind).itemsize
        data = np.ascontiguousarray(records[:, :, at : at + size]).view(kind).reshape(n_tiles, n_records, each, -1)
        part = data.transpose(0, 3, 1, 2).reshape(n_tiles * TILE_ROWS, -1)
        n = -(-cols // (SUPER_COLUMNS if kind is outer and row.nested else stored.group_size))
        found.append(np.ascontiguousarray(part[:rows, :n]))
        at += size
    scales, minima = (found[0], found[1] if row.minimum else None)
    rest = found[row.factors :]
    return np.ascontiguousarray(codes).view(np.int8), Factors(scales, minima, *rest)


def values(codes: NDArray[np.int8], factors: Factors, stored: WeightType) -> Floats:
    """The weights, float32: products and sums rounded as ggml's dequantisation rounds them."""
    row, cols = stored.storage, codes.shape[1]
    levels = np.array(row.table, np.float32)[codes] if row.table else codes.astype(np.float32)
    weights = levels * _spread(factors.scales, factors.outer, stored.group_size, cols)
    if factors.minima is not None:
        weights += _spread(factors.minima, factors.outer_minima, stored.group_size, cols)
    return weights


def _spread(inner: NDArray, outer: NDArray | None, group: int, cols: int) -> Floats:
    whole = inner.astype(np.float32)
    if outer is not None:
        whole *= np.repeat(outer.astype(np.float32), SUPER_COLUMNS // group, axis=1)
    return np.repeat(whole, group, axis=1)[:, :cols]


def _kinds(row: StorageType) -> tuple[str, str]:
    """NumPy's names of the factors' types: those of groups, outer ones."""
    return {"f16": "<f2", "u8*f16": "u1", "i8*f16": "i1"}[row.scale], "<f2"


def _in_order(factors: Factors, row: StorageType) -> list[tuple[NDArray, int]]:
    """Factors as they lie in a record, and how many of each it has."""
    groups = row.record_groups
    return [(part, each) for part, each in zip(factors, (groups, groups, 1, 1), strict=True) if part is not None]


def _lines(steps: Words, row: StorageType) -> Words:
    """Words of lines (tiles, 16, lines) from words of four codes (tiles, 16, steps)."""
    nibbles, more = run_lines(row)
    runs = steps.reshape(*steps.shape[:2], -1, 2 * nibbles)
    low = runs & _LOW
    lines = low[..., 0::2] | low[..., 1::2] << np.uint32(4)
    if more:
        high = np.zeros((*runs.shape[:3], 1), np.uint32)
        for s in range(2 * nibbles):
            high[..., 0] |= (runs[..., s] >> np.uint32(4) & _further(row)) << np.uint32((row.bits - 4) * s)
        lines = np.concatenate([lines, high], axis=3)
    return np.ascontiguousarray(lines).reshape(*steps.shape[:2], -1)


def _steps(lines: Words, row: StorageType) -> Words:
    """The inverse of `_lines`."""
    nibbles, more = run_lines(row)
    runs = lines.reshape(*lines.shape[:2], -1, nibbles + more)
    steps = np.stack([runs[..., :nibbles] & _LOW, runs[..., :nibbles] >> np.uint32(4) & _LOW], axis=-1)
    steps = steps.reshape(*runs.shape[:3], 2 * nibbles)
    for s in range(2 * nibbles if more else 0):
        steps[..., s] |= (runs[..., nibbles] >> np.uint32((row.bits - 4) * s) & _further(row)) << np.uint32(4)
    return steps


def _further(row: StorageType) -> np.uint32:
    """In each byte the bits that a code has beyond 4."""
    return np.uint32(((1 << row.bits - 4) - 1) * 0x01010101)


assert LINE_BYTES == 4 * TILE_ROWS
