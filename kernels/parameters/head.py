"""Parameters of kernels around the head: tokens that are sampled from logits, logits that are screened."""

from __future__ import annotations

from typing import NamedTuple


class _Sample(NamedTuple):
    vocab_size: int
    logits_stride: int
    work_stride: int
    """Bytes from one row of work to the next."""
    sums: int
    """Offset of the sums of chunks in a row of work (abi.sample_row)."""
    candidates: int
    """Offset of the candidates."""


class _Screen(NamedTuple):
    """Parameters of screening. The first nine are those of LINEAR, whose matmuls read them; later ones of LINEAR are 0
    for them: one matrix, whose single token goes through all streams."""

    tiles: int
    tile_bytes: int
    records: int
    x_stride: int
    x_scales: int
    x_offsets: int
    out_stride: int
    """Bytes from one row of logits to the next, and of estimates."""
    rows: int
    chunk: int
    group: int
    """Columns of the head that share a scale."""
    token_tiles: int
    """Tokens of the blocks (abi.pack_token_tiles): as in LINEAR."""
    scratch: int
    """Scratch bytes of a thread."""
    vocab_size: int
    work_stride: int
    """Bytes from one row of work to the next (abi.screen_row)."""
    low_stride: int
    """Bytes from one row of the transformed input to the next."""
    width: int
    """Elements of such a row."""
    rank: int
    """Number of them that the estimates use, rounded to int8."""


SAMPLE = _Sample(*range(5))
SCREEN = _Screen(*range(17))
