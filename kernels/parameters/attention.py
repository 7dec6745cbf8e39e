"""Parameters of rotation, of K and V that are stored, latent ones too, and of attention."""

from __future__ import annotations

from typing import NamedTuple


class _Rope(NamedTuple):
    stride: int
    """Bytes of a qkv row."""
    heads: int
    kv_heads: int
    head_dim: int
    table_stride: int
    """Bytes of one position in the table: cosines, then sines."""
    block_bytes: int
    """Bytes of K, and of V, of one KV head in a block (abi.kv_block_bytes)."""
    blocks: int
    """Blocks of the pool: as many are between a KV head and the next."""
    eps: int
    """Epsilon of the head norms, float32 bits."""
    rows: int
    """Index of the count of tokens."""
    rotary: int
    """Dimensions of a head that turn; 0 = none."""
    apart: int
    """Dimensions from one of a pair that turns to the other, which begins the second half of those that do."""
    recent: int
    """Index of the layer's block table: 1 with a window, whose table drops blocks that are no longer seen."""


class _Attention(NamedTuple):
    q_stride: int
    out_stride: int
    heads: int
    kv_heads: int
    head_dim: int
    block_bytes: int
    """Bytes of K, and of V, of one KV head in a block."""
    blocks: int
    """Blocks of the pool."""
    window: int
    """Positions a query sees, itself included; 0 = all."""
    scale: int
    """Factor of scores, mostly 1 / sqrt(head_dim); float32 bits."""
    scratch: int
    """Scratch bytes of a thread."""
    splits: int
    """Most splits of a context."""
    tokens: int
    """Tokens of a unit of work."""
    rows: int
    """Index of the count of tokens."""
    most: int
    """attention_select: rows that a head needs; 0 = by the least share."""
    least: int
    """attention_select: how far below the largest score a wanted one may be, float32 bits; -inf = any."""
    instead: int
    """INSTEAD_*: replacement for omitted rows."""
    cap: int
    """Scores become cap x tanh(score / cap), float32 bits; 0 = they stay as they are."""
    values: int
    """Latent KV: V is this many of K's first elements, and not stored by itself; 0 = it is stored."""
    turned: int
    """Latent KV: where in a thread's scratch the V of a split is made of its K."""
    recent: int
    """Index of the layer's block table, as in ROPE."""
    edits: int
    """True if scores are changed before their softmax: by a cap, or with FLAG_ALIBI."""


class _Latent(NamedTuple):
    stride: int
    """Bytes of a row of queries, after which the token's key is."""
    q_stride: int
    """Bytes of a row of which the queries' rotated parts are taken."""
    q_first: int
    """Element at which these begin."""
    c_stride: int
    """Bytes of a row that has the latent, then the key's rotated part."""
    c_first: int
    """Element at which it begins."""
    heads: int
    rank: int
    """Elements of the latent."""
    rotary: int
    """Elements after it, which turn."""
    table_stride: int
    """See ROPE; so are the next fields."""
    block_bytes: int
    blocks: int
    eps: int
    """Epsilon of the latent's norm, float32 bits."""
    rows: int
    recent: int
    still: int
    """True if nothing turns: the table has one row, which all positions share."""


ROPE = _Rope(*range(12))
ATTENTION = _Attention(*range(21))
LATENT = _Latent(*range(15))
