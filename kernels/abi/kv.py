"""KV blocks, in which K and V of tokens are, and sizes of attention's scratch."""

from __future__ import annotations

from edgeinfer.quant import KV_TYPES

from .ctx import MASK_TOKENS

BLOCK_TOKENS = 16
"""Tokens of a KV block.

A layer's K, V and, with int8, their scales are in planes of their own, one after the other. A plane is ordered [KV
head][block of the pool], because attention reads one head over many blocks: its next reads are next in memory where
blocks follow each other. The contents of a block are in ops/rope.py.
"""
KV_SCALES_BYTES = 2 * 2 * BLOCK_TOKENS
"""int8: bytes of the scales of one head in a block, 16 of K and 16 of V, in fp16."""
SPLIT_BLOCKS = 16
"""Blocks of an attention split: contexts are cut at fixed lengths, so that results do not depend on the threads."""


def padded_head_dim(head_dim: int) -> int:
    """Elements of a stored head: whole vectors of 16."""
    return -(-head_dim // 16) * 16


def kv_block_bytes(kv: str, head_dim: int) -> int:
    """Bytes of K, and of V, of one head in one block."""
    return BLOCK_TOKENS * KV_TYPES[kv].element_bytes(padded_head_dim(head_dim))


def kv_head_bytes(kv: str, head_dim: int, latent: bool = False) -> int:
    """Bytes of one head of one block in all planes: K, V and their scales, if any; of `latent` KV there is no V."""
    whole = 2 * BLOCK_TOKENS * KV_TYPES[kv].row_bytes(padded_head_dim(head_dim))
    return whole - kv_block_bytes(kv, head_dim) if latent else whole


ATTENTION_TILE = 8
"""Most (token, query head) rows that go through attention together."""
ATTENTION_STATE = 384 + 3 * 8 * SPLIT_BLOCKS
"""Bytes that attention keeps of a tile beside its rows: their scales and largest scores, where the blocks are."""
STRETCH_SPLITS = 4
"""Splits whose chosen blocks of V are summed together: 64 blocks, bits of a word."""
ATTENTION_TOKENS = 16
"""Most tokens of a forward pass whose attention is split along the context: its last ones."""
ATTENTION_ROWS = 128
"""Most rows of a unit of work of such a pass: the queries that a thread keeps for the next split of their context."""
MEAN_BLOCKS = SPLIT_BLOCKS
"""Most blocks whose V stands for omitted rows, evenly spread over those that are MASK_TOKENS before a token: these
are the same blocks however the token came about."""
PATH_BLOCKS = MASK_TOKENS // BLOCK_TOKENS + 1
"""Most blocks of one KV head that the rows of a mask touch, once they are one after the other."""


def score_row_bytes(splits: int) -> int:
    """Bytes of the scores of one (token, query head): 4 for each position and block, 8 for each split, 16 for the
    choice.

    A block has the largest of its scores; a split has the largest and the sum of exp(score - largest); the choice is
    the least score that is requested, the last position at which that score is, then of all splits the largest and the
    sum. The position is int32, all else float32.
    """
    return -(-(splits * (4 * SPLIT_BLOCKS * (BLOCK_TOKENS + 1) + 8) + 16) // 64) * 64


def attention_scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch of a thread in attention: a tile's state, scores of one split, sums and merged sums, a path, queries."""
    padded = padded_head_dim(head_dim)
    tile = ATTENTION_STATE + 128 * ATTENTION_TILE + 4 * ATTENTION_TILE * (SPLIT_BLOCKS * BLOCK_TOKENS + 2 * padded)
    path = PATH_BLOCKS * max(2 * kv_block_bytes(kv, head_dim) + KV_SCALES_BYTES for kv in KV_TYPES)
    rows = min(ATTENTION_ROWS, -(-ATTENTION_TOKENS * group // ATTENTION_TILE) * ATTENTION_TILE)
    return tile + path + rows * (32 + 4 * padded)
