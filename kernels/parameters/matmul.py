"""Parameters of matmuls: of linear layers, gated ones, and those of experts."""

from __future__ import annotations

from typing import NamedTuple


class _Linear(NamedTuple):
    tiles: int
    """Tiles of 16 rows (gated: pairs of them)."""
    tile_bytes: int
    records: int
    """Packed groups of a tile (f16: pairs of columns; f32: columns)."""
    x_stride: int
    """Bytes from one token's x to the next."""
    x_scales: int
    """Offset of the scales in a row of x: after its values, padding included."""
    x_offsets: int
    """Offset of the offsets (-8 x sum of a group) in a row of x."""
    out_stride: int
    rows: int
    """Index of the count of tokens."""
    chunk: int
    """Tiles per claimed chunk."""
    activation: int
    """Gated: number of the hidden activation, see ACTIVATIONS."""
    scratch: int
    """Gated: scratch bytes of a thread."""
    token_tiles: int
    """Tokens of the blocks (abi.pack_token_tiles): compiled into the kernel, here for its reference."""
    fused: int
    """FUSED_*: the operation of each thread on row 0 of the source, alone, where COUNT_SEVERAL is 0; x is not read
    then."""
    width: int
    """Fused input: elements of the source's row."""
    group: int
    """Fused input: elements that share a scale."""
    eps: int
    """Fused input: epsilon of the norm, float32 bits."""
    limit: int
    """Gated: limit of fatrelu and swiglu_oai, float32 bits."""
    active: int
    """Experts: how many a token goes through; `tiles` are those of one expert."""
    source_stride: int
    """Experts: bytes from one row of the source to the next, where a single token has a row for each expert; 0 = all
    its experts read the same row."""
    head_tiles: int
    """linear: tiles of each head's own matrix, all one after the other; chunks end with heads. 0 = one matrix."""
    head_x: int
    """Heads: bytes from one head's x to the next's."""
    head_gap: int
    """Heads: bytes of an output row from one head's part to the next's."""
    since: int
    """Experts with FLAG_SLOTS: the first one that the instruction computes."""
    until: int
    """The one after the last."""
    expert_bytes: int
    """Experts: bytes from one expert's matrix to the next's, where they are not in slots."""
    left_out: int
    """FUSED_LEFT_OUT, FLAG_APART: elements of the source, named by operand 6, that are zeros in x and values apart."""
    halved: int
    """Whether a single token goes through half as many row tiles at once as kernels are made for (Isa.streams)."""


LINEAR = _Linear(*range(27))
