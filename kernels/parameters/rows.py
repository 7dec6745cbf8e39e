"""Parameters of kernels that work row by row: embedding, norms, quantising, functions of values, learned positions."""

from __future__ import annotations

from typing import NamedTuple


class _Rows(NamedTuple):
    width: int
    """Elements of a row."""
    in_stride: int
    out_stride: int
    rows: int
    """Index of the count of rows."""
    scales: int
    """q8 output: offset of the scales in a row: after its values, padding included."""
    offsets: int
    """q8 output: offset of the offsets (-8 x sum of a group) in a row."""
    group: int
    """q8 output: elements that share a scale."""
    eps: int
    """float32 bits."""
    tile_bytes: int
    """embed: bytes of a tile of the table."""
    scratch: int
    """rms_norm_q8, quantize in an order or without outliers: scratch bytes of a thread."""
    token_tiles: int
    """q8 output: tokens of the blocks (abi.pack_token_tiles): as in LINEAR."""
    heads: int
    """quantize: pieces of `width` elements that a row has side by side, each quantised to rows of its own; 0 = 1."""
    head_out: int
    """quantize: bytes from the rows of one head to those of the next."""
    piece: int
    """embed: columns of a lane where a tile of the table is one token's row, lane by lane; 0 = it has 16 rows."""
    parts: int
    """norm_f32: parts of a row, of `width` elements each, that are normed one by one with the same weight; 0 = one."""
    ordered: int
    """quantize: whether elements are taken in the order of operand 2."""
    left_out: int
    """quantize: elements, named by operand 2, that become zeros and values apart of the row; 0 = none."""


class _Values(NamedTuple):
    width: int
    """Elements of a row."""
    stride: int
    rows: int
    """Index of the count of rows."""
    function: int
    """Number of the function, see VALUE_FUNCTIONS."""
    factor: int
    """scale: the factor of values; soft_cap: the cap; fatrelu: the limit. float32 bits."""
    by_stride: int
    """FLAG_TIMES: bytes from one row of factors to the next."""


class _Positions(NamedTuple):
    width: int
    """Elements of a row, and of one of the table."""
    stride: int
    """Bytes from one token's row to the next."""
    rows: int
    """Index of the count of rows."""
    offset: int
    """Row of the table that position 0 has."""
    tile_bytes: int
    """Bytes of a tile of the table."""


ROWS = _Rows(*range(17))
VALUES = _Values(*range(6))
POSITIONS = _Positions(*range(5))
