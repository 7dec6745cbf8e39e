"""Blocks of GGUF tensors as lines of layout tile16: codes and scales are moved as they are, no number is calculated.

A weight's rows come as bytes, (rows, bytes of a row), in the file's own form; they are put in the weight's order by
whoever reads them, and packed here. Q4_0 is an fp16 scale, then 16 bytes whose low nibbles are columns 0 to 15 of the
block and whose high nibbles columns 16 to 31, each code + 8; Q8_0 an fp16 scale, then 32 codes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import WeightType
from edgeinfer.quant import LINE_BYTES, layouts

Bytes = NDArray[np.uint8]
TILE, GROUP = 16, 32
_Q4_0, _Q8_0 = (np.dtype([("scale", "<u2"), ("codes", f"V{n}")]) for n in (16, 32))
_LOW, _HIGH = np.uint64(0x0F0F0F0F), np.uint64(0xF0F0F0F0)


def pack_blocks(rows: Bytes, kind: str, stored: WeightType, name: str) -> Bytes:
    """Bytes of rows in layout tile16, where `has_packing` says so; rows are padded to 16 with zeros.

    Raises
    ------
    CheckpointError
        A scale or a value is not finite, or an 8-bit code is -128; the tensor is called `name`.
    """
    return _PACKING[kind, stored.dtype](rows, name)


def has_packing(kind: str, stored: WeightType) -> bool:
    """Whether rows of this type become the stored type by moving bits."""
    return (kind, stored.dtype) in _PACKING and stored.group_size in (0, GROUP) and stored.layout == "tile16"


def as_q8_0(rows: Bytes) -> Bytes:
    """Rows of Q4_0 as those of Q8_0: the same scales and codes."""
    blocks = rows.reshape(len(rows), -1, 18)
    out = np.empty((*blocks.shape[:2], 34), np.uint8)
    out[..., :2] = blocks[..., :2]
    codes = blocks[..., 2:]
    out[..., 2:18], out[..., 18:] = codes & 15, codes >> 4
    out[..., 2:] -= np.uint8(8)
    return out.reshape(len(rows), -1)


def _pack_q4_0(rows: Bytes, name: str) -> Bytes:
    scales, codes = _tiles(rows, _Q4_0)
    pairs = codes.view(np.uint64)  # two words, each of four columns and the four that are 16 on
    odd = pairs >> np.uint64(32)
    lines = np.empty((*pairs.shape[:-1], 4), np.uint32)
    lines[..., :2] = pairs & _LOW | (odd & _LOW) << np.uint64(4)
    lines[..., 2:] = pairs >> np.uint64(4) & _LOW | odd & _HIGH
    return _records(lines, scales, name)


def _pack_q8_0(rows: Bytes, name: str) -> Bytes:
    scales, codes = _tiles(rows, _Q8_0)
    if codes.view(np.int8).min(initial=0) == -128:
        raise CheckpointError(f"The tensor {name} has an 8-bit code of -128, which llama.cpp does not write and whose "
                              "products overflow in kernels; convert the file again from the original model.")
    return _records(codes.view(np.uint32), scales, name)


def _tiles(rows: Bytes, block: np.dtype[np.void]) -> tuple[NDArray[np.uint16], Bytes]:
    """Scales (tiles, 16, groups) and codes (tiles, 16, groups, bytes) of blocks, with rows of zeros at the end.

    Copied as items of a structure: copying them as slices of bytes takes ten times as long.
    """
    n_tiles = -(-len(rows) // TILE)
    if len(rows) != n_tiles * TILE:
        rows = np.concatenate([rows, np.zeros((n_tiles * TILE - len(rows), rows.shape[1]), np.uint8)])
    blocks = np.ascontiguousarray(rows).view(block).reshape(n_tiles, TILE, -1)
    codes = np.ascontiguousarray(blocks["codes"]).view(np.uint8).reshape(*blocks.shape, block.itemsize - 2)
    return np.ascontiguousarray(blocks["scale"]), codes


def _records(lines: NDArray[np.uint32], scales: NDArray[np.uint16], name: str) -> Bytes:
    """Records of two groups: the lines of each, then a line of 2 x 16 scales; `lines` are (tiles, 16, groups, n)."""
    n_tiles, _, groups, n = lines.shape
    check_halves(scales, name, "scale")
    n_records = -(-groups // 2)
    out = np.zeros((n_tiles, n_records, 2 * n + 1, TILE), np.uint32)
    body = np.empty((n_tiles, groups, n, TILE), np.uint32)
    body[:] = lines.transpose(0, 2, 3, 1)
    tail = np.zeros((n_tiles, 2 * n_records, TILE), np.uint16)
    tail[:, :groups] = scales.transpose(0, 2, 1)
    whole = groups // 2
    out[:, :whole, : 2 * n] = body[:, : 2 * whole].reshape(n_tiles, whole, 2 * n, TILE)
    if groups % 2:
        out[:, whole, :n] = body[:, -1]
    out[:, :, 2 * n] = tail.reshape(n_tiles, n_records, 2 * TILE).view(np.uint32)
    return out.reshape(-1).view(np.uint8)


def _pack_f16(rows: Bytes, name: str) -> Bytes:
    values = rows.view(np.uint16)
    check_halves(values, name, "value")
    return layouts.pack_tile16(values.view(np.float16), "f16")


def _pack_f32(rows: Bytes, name: str) -> Bytes:
    words = rows.view(np.uint32)
    if ((words & np.uint32(0x7F800000)) == 0x7F800000).any():
        raise _not_finite(name, "value")
    return layouts.pack_tile16(words.view(np.float32), "f32")


def check_halves(values: NDArray[np.uint16], name: str, what: str) -> None:
    """Refuse numbers in half precision of which one is NaN or infinite."""
    if ((values & np.uint16(0x7C00)) == 0x7C00).any():
        raise _not_finite(name, what)


def _not_finite(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"The tensor {name} has a {what} that is NaN or infinite; weights must be finite: download "
                           "the file again.")


_PACKING: dict[tuple[str, str], Callable[[Bytes, str], Bytes]] = {
    ("Q4_0", "q4"): _pack_q4_0, ("Q8_0", "int8"): _pack_q8_0, ("F16", "f16"): _pack_f16, ("F32", "f32"): _pack_f32,
}
assert LINE_BYTES == 4 * TILE
