"""Blocks of GGUF tensors as lines of layout tile16: codes and scales are moved as they are, no number is calculated.

A weight's rows come as bytes, (rows, bytes of a row), in the file's own form; they are put in the weight's order by the
reader of the file, and packed here, from the parts that `block_parts.py` finds in each block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.quant import TILE_ROWS, WeightType, layouts

from .block_parts import PARTS, Bytes, Parts
from .low_bits import ternary_codes, ternary_scale
from .types import BY_NAME

_ROWS = np.dtype(f"V{TILE_ROWS}")
"""A byte of each row of a tile."""
CHUNK_BYTES = 1 << 19
"""Bytes of rows that are packed at a time: the results stay near a core, and between two steps of a fourth of that
two threads would wait for each other more than they work."""


def pack_blocks(rows: Bytes, kind: str, stored: WeightType, name: str) -> Bytes:
    """Bytes of rows in layout tile16, where `has_packing` says so; rows are padded to 16 with zeros.

    Raises
    ------
    CheckpointError
        A scale or a value is not finite, or no number of ours; the tensor is called `name`.
    """
    if (kind, stored.dtype) in _FLOATS:
        return _FLOATS[kind, stored.dtype](rows, name)
    form, parts_of = PARTS[kind, stored.dtype]
    n_tiles = -(-len(rows) // TILE_ROWS)
    if len(rows) != n_tiles * TILE_ROWS:
        rows = np.concatenate([rows, np.zeros((n_tiles * TILE_ROWS - len(rows), rows.shape[1]), np.uint8)])
    blocks = np.ascontiguousarray(rows).view(form).reshape(n_tiles, TILE_ROWS, -1)
    columns, same = blocks.shape[2] * BY_NAME[kind].elements, max(stored.group_size // BY_NAME[kind].elements, 1)
    out = np.zeros((n_tiles, stored.tile_records(columns), stored.record_bytes), np.uint8)
    per_record = stored.padded_columns(columns) // out.shape[1] * stored.storage.bits // 32
    step = max(1, CHUNK_BYTES // (TILE_ROWS * rows.shape[1]))
    for first in range(0, n_tiles, step):
        parts = parts_of(blocks[first : first + step].transpose(0, 2, 1), name)
        for halves in parts.halves:
            check_halves(halves, name, "scale")
        if same > 1:  # blocks of a group that a larger one of the file was divided into
            parts = parts._replace(halves=tuple(halves[:, ::same] for halves in parts.halves))
        _write_records(parts, out[first : first + step], per_record)
    return out.reshape(-1)


def has_packing(kind: str, stored: WeightType) -> bool:
    """Return whether rows of this type become the stored type by moving bits."""
    known = (kind, stored.dtype) in PARTS or (kind, stored.dtype) in _FLOATS
    groups = (64, 128) if stored.dtype == "q2" else (0, 16, 32)
    return known and stored.group_size in groups and stored.layout == "tile16"


def restated(rows: Bytes, kind: str, wanted: str) -> Bytes:
    """Rows of one type in the form of another that has the same scales and codes: Q8_0, Q4_0 or Q2_0."""
    if kind == wanted:
        return rows
    if wanted == "Q2_0":
        return _ternary_as_q2_0(rows, kind)
    if kind != "Q4_0":
        rows = _ternary_as_q4_0(rows, kind)
    return _q4_0_as_q8_0(rows) if wanted == "Q8_0" else rows


def _ternary_as_q2_0(rows: Bytes, kind: str) -> Bytes:
    whole, at = BY_NAME[kind], ternary_scale(kind)
    blocks = rows.reshape(-1, whole.nbytes)
    codes = (ternary_codes(blocks, kind) + np.int8(1)).view(np.uint8).reshape(len(blocks), -1, 16, 4)
    out = np.empty((len(blocks), whole.elements // 64, 18), np.uint8)
    out[..., :2] = blocks[:, None, at : at + 2]
    out[..., 2:] = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
    return out.reshape(len(rows), -1)


def _ternary_as_q4_0(rows: Bytes, kind: str) -> Bytes:
    whole = BY_NAME[kind]
    blocks = rows.reshape(-1, whole.nbytes)
    codes = (ternary_codes(blocks, kind) + np.int8(8)).view(np.uint8).reshape(len(blocks), -1, 2, 16)
    out = np.empty((len(blocks), whole.elements // 32, 18), np.uint8)
    at = ternary_scale(kind)
    out[..., :2] = blocks[:, None, at : at + 2]
    out[..., 2:] = codes[:, :, 0] | codes[:, :, 1] << np.uint8(4)
    return out.reshape(len(rows), -1)


def _q4_0_as_q8_0(rows: Bytes) -> Bytes:
    blocks = rows.reshape(len(rows), -1, 18)
    out = np.empty((*blocks.shape[:2], 34), np.uint8)
    out[..., :2] = blocks[..., :2]
    codes = blocks[..., 2:]
    out[..., 2:18], out[..., 18:] = codes & 15, codes >> 4
    out[..., 2:] -= np.uint8(8)
    return out.reshape(len(rows), -1)


def check_halves(values: NDArray[np.uint16], name: str, what: str) -> None:
    """Refuse numbers in half precision if any is NaN or infinite."""
    if ((values & np.uint16(0x7C00)) == 0x7C00).any():
        raise _not_finite(name, what)


def _not_finite(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"The tensor {name} has a {what} that is NaN or infinite; weights must be finite: download "
                           "the file again.")


# -- records -----------------------------------------------------------------------------------------------------------


def _write_records(parts: Parts, out: Bytes, per_record: int) -> None:
    """Fill records (tiles, records, bytes) of this many lines of codes; an absent last group stays zeros."""
    n_tiles, n_records, _ = out.shape
    words = out.view(np.uint32).reshape(n_tiles, n_records, -1, TILE_ROWS)
    lines = parts.lines.reshape(n_tiles, -1, TILE_ROWS)
    whole, rest = divmod(lines.shape[1], per_record)
    words[:, :whole, :per_record] = lines[:, : whole * per_record].reshape(n_tiles, whole, per_record, TILE_ROWS)
    if rest:
        words[:, whole, :rest] = lines[:, whole * per_record :]
    at = 64 * per_record
    for inner in parts.nested:
        groups = out[:, :, at : at + TILE_ROWS * len(inner)].view(_ROWS)
        groups[...] = inner.view(_ROWS)[..., 0].transpose(1, 2, 0)
        at += TILE_ROWS * len(inner)
    for factors in parts.halves:
        if rest:  # the absent group's, which only fp16 factors have
            factors = np.concatenate([factors, np.zeros((n_tiles, 1, TILE_ROWS), factors.dtype)], axis=1)
        data = np.ascontiguousarray(factors).reshape(n_tiles, n_records, -1).view(np.uint8)
        out[:, :, at : at + data.shape[2]] = data
        at += data.shape[2]


# -- floats ------------------------------------------------------------------------------------------------------------


def _pack_f16(rows: Bytes, name: str) -> Bytes:
    values = rows.view(np.uint16)
    check_halves(values, name, "value")
    return layouts.pack_tile16(values.view(np.float16), "f16")


def _pack_f32(rows: Bytes, name: str) -> Bytes:
    words = rows.view(np.uint32)
    if ((words & np.uint32(0x7F800000)) == 0x7F800000).any():
        raise _not_finite(name, "value")
    return layouts.pack_tile16(words.view(np.float32), "f32")


_FLOATS: dict[tuple[str, str], Callable[[Bytes, str], Bytes]] = {("F16", "f16"): _pack_f16, ("F32", "f32"): _pack_f32}
