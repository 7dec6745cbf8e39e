"""Layout tile16 of codes of 2 to 8 bits with any factors: the specification for other formats' types.

As q4 (`layouts.py`), but for this. Codes are stored as level - lowest level, or as indices into the type's table. A
code is one piece of 2, 4 or 8 bits, or two: its lowest 2 or 4 bits and the others (`StorageType.planes`). Steps of 4
columns go in runs, of as many as fill whole lines with either piece: 2 steps with 4 bits, 8 with 3 or 5, 4 with 6. The
lines of the lowest bits come first; a line of pieces of b bits has those of 8 / b steps, step s of them in bits b s to
b s + b - 1 of each byte.

Behind the codes of all groups of a record come its factors, each for 16 rows:

* fp16: as in q4 a line of 2 x 16 scales, then, with minima, one of 2 x 16 minima;
* 8 bits x fp16 of 256 columns, which are the record: 16 bytes of scales for each group, then as many of minima, then a
  line with 16 outer scales and 16 outer minima (zeros without minima).

A weight is level x scale + minimum, of nested factors level x (outer x scale) + (outer minimum x minimum).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .table import LINE_BYTES, SUPER_COLUMNS, TILE_ROWS, StorageType
from .types import WeightType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]


class Factors(NamedTuple):
    """Factors and offsets of codes: arrays (rows, groups), outer ones (rows, columns / 256)."""

    scales: NDArray
    """float16; of nested factors uint8 or int8, as the type says."""
    minima: NDArray | None = None
    outer: NDArray[np.float16] | None = None
    outer_minima: NDArray[np.float16] | None = None

    def of_rows(self, rows: slice) -> Factors:
        """Return those of some rows."""
        return Factors(self.scales[rows], *(None if part is None else part[rows] for part in self[1:]))

    @classmethod
    def joined(cls, parts: Sequence[Factors]) -> Factors:
        """Return those of successive rows together."""
        first, *others = (None if part[0] is None else np.concatenate(part) for part in zip(*parts, strict=True))
        assert first is not None
        return cls(first, *others)


def pack(codes: NDArray[np.int8], stored: WeightType, factors: Factors) -> Bytes:
    """Bytes of a matrix (rows, cols) of levels, or of indices into the type's table."""
    (rows, cols), row = codes.shape, stored.storage
    n_tiles, n_records, width = -(-rows // TILE_ROWS), stored.tile_records(cols), stored.padded_columns(cols)
    padded = np.zeros((n_tiles * TILE_ROWS, width), np.uint8)
    padded[:rows, :cols] = codes.view(np.uint8) + np.uint8(row.offset)
    padded[:rows, cols : -(-cols // stored.group_size) * stored.group_size] = row.offset
    out = np.zeros((n_tiles, n_records, stored.record_bytes), np.uint8)
    lines = _lines(padded.view(np.uint32).reshape(n_tiles, TILE_ROWS, -1), row)
    write_lines(out, lines)
    at = 16 * (width // n_records) * row.bits // 8
    for part, each in _in_order(factors, row.record_groups(stored.group_size)):
        whole = np.zeros((n_tiles * TILE_ROWS, n_records * each), part.dtype)
        whole[:rows, : part.shape[1]] = part
        at = write_factors(out, whole.reshape(n_tiles, TILE_ROWS, -1), at)
    return out.reshape(-1)


def write_lines(out: Bytes, lines: Words) -> None:
    """Put words (tiles, 16, lines) at the beginning of records (tiles, records, bytes)."""
    n_tiles, n_records, _ = out.shape
    words = lines.reshape(n_tiles, TILE_ROWS, n_records, -1)
    room = out.view(np.uint32).reshape(n_tiles, n_records, -1, TILE_ROWS)
    room[:, :, : words.shape[3]] = words.transpose(0, 2, 3, 1)


def write_factors(out: Bytes, values: NDArray, at: int) -> int:
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
    groups = row.record_groups(stored.group_size)
    for kind, each in [(inner, groups)] * row.factors + [(outer, 1)] * (row.factors if row.nested else 0):
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
    levels = np.array(stored.table, np.float32)[codes] if row.indexed else codes.astype(np.float32)
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


def _in_order(factors: Factors, groups: int) -> list[tuple[NDArray, int]]:
    """Factors as they are in a record of this many groups, and how many of each it has."""
    return [(part, each) for part, each in zip(factors, (groups, groups, 1, 1), strict=True) if part is not None]


def _lines(steps: Words, row: StorageType) -> Words:
    """Words of lines (tiles, 16, lines) from words of four codes (tiles, 16, steps)."""
    runs, low, first = steps.reshape(*steps.shape[:2], -1, row.run_steps), 0, 0
    lines = np.empty((*runs.shape[:3], row.run_lines), np.uint32)
    for bits in row.planes:
        plane = _right(runs[..., 0 :: 8 // bits], low) & _mask(bits)
        for s in range(1, 8 // bits):
            plane |= (_right(runs[..., s :: 8 // bits], low) & _mask(bits)) << np.uint32(bits * s)
        lines[..., first : first + plane.shape[-1]] = plane
        low, first = low + bits, first + plane.shape[-1]
    return lines.reshape(*steps.shape[:2], -1)


def _steps(lines: Words, row: StorageType) -> Words:
    """The inverse of `_lines`."""
    runs, low, first = lines.reshape(*lines.shape[:2], -1, row.run_lines), 0, 0
    steps = np.empty((*runs.shape[:3], row.run_steps), np.uint32)
    for bits in row.planes:
        plane = np.ascontiguousarray(runs[..., first : first + row.run_steps * bits // 8])
        for s in range(8 // bits):
            pieces = _right(plane, bits * s) & _mask(bits)
            if low:
                steps[..., s :: 8 // bits] |= pieces << np.uint32(low)
            else:
                steps[..., s :: 8 // bits] = pieces
        low, first = low + bits, first + plane.shape[-1]
    return steps


def _right(words: Words, bits: int) -> Words:
    """Words shifted to the right."""
    return words >> np.uint32(bits) if bits else words


def _mask(bits: int) -> np.uint32:
    """Return a word with the lowest `bits` bits of each byte set."""
    return np.uint32(((1 << bits) - 1) * 0x01010101)


assert LINE_BYTES == 4 * TILE_ROWS
