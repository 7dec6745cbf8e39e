"""Where the K and V lie that a token sees: its sequence's blocks, and the blocks of its path where it is in a tree.

A tree's nodes are stored in the order in which they came, so the rows of a path have gaps. A token with a mask goes
through attention by itself, over blocks in scratch that hold its path without the gaps: the blocks that its sequence
would have if it were that path. So the passes are the same as for any other token, and the bits those of the path
run as a chain.
"""

from __future__ import annotations

from functools import cache

from ..abi import (
    BLOCK_TOKENS,
    CTX_SEQUENCES,
    FLAG_HOLES,
    SEQUENCE_BLOCKS,
    SEQUENCE_BYTES,
    SPLIT_BLOCKS,
    TOKEN_BASE,
    TOKEN_MASK,
    TOKEN_ROW,
    TOKEN_SEQUENCE,
)
from ..parameters import ATTENTION
from ..vector.record import flags, inline, operand, outlined, parameter, token
from ..vector.simd import (
    load_f32x16,
    load_i8,
    load_i32,
    load_i64,
    load_u16,
    store_f32x16,
    store_i8,
    store_i16,
    store_i32,
    store_i64,
)
from .attention_rows import T_BLOCKS, path_at


@inline
def block_table(ctx, t):
    """Address of the block table of token t's sequence."""
    return load_i64(load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * token(ctx, t, TOKEN_SEQUENCE) + SEQUENCE_BLOCKS)


@inline
def head_address(rec, ctx, h):
    """Address of KV head h in block 0."""
    return operand(rec, ctx, 2) + h * parameter(rec, ATTENTION.head_bytes)


@inline
def block_address(rec, blocks, kv_head, b):
    """Address of block b of a sequence for one KV head."""
    return kv_head + load_i32(blocks + 4 * b) * parameter(rec, ATTENTION.block_bytes)


@inline
def value_at(block, row, padded):
    """Address of element 0 of a row of V in a block of int8; the next element is 4 bytes behind it."""
    return block + BLOCK_TOKENS * padded + (row >> 2) * 4 * padded + (row & 3)


@inline
def split_block(tile, kv_head, b):
    """Address of block b of the split in work, for the KV head whose address in block 0 is given."""
    return kv_head + load_i64(tile + T_BLOCKS + 8 * b)


@inline
def set_split_block(tile, kv_head, b, address):
    """Say where `split_block` finds a block. A distance from the KV head is kept: it makes for the better loops."""
    store_i64(tile + T_BLOCKS + 8 * b, address - kv_head)


@inline
def layer_holes(rec, ctx):
    """Address of what says which rows of block 0 the layer lacks, 0 where it has those of all tokens."""
    return operand(rec, ctx, 6) if flags(rec) & FLAG_HOLES else 0


@inline
def has_path(ctx, t):
    """Whether token t does not see all rows up to its own."""
    return token(ctx, t, TOKEN_MASK) != -1


@inline
def place_of(ctx, t):
    """Place of token t in its path: the row that it would have in a chain, and has where it has no mask."""
    row = token(ctx, t, TOKEN_ROW)
    if not has_path(ctx, t):
        return row
    base, place = token(ctx, t, TOKEN_BASE), token(ctx, t, TOKEN_BASE)
    ancestors = token(ctx, t, TOKEN_MASK) & ((1 << (row - base)) - 1)
    while ancestors != 0:
        ancestors &= ancestors - 1
        place += 1
    return place


@cache
def path_gather(element):
    """Make ``gather(rec, ctx, tile, unit, blocks, kv_head, padded)`` for a stored type of so many bytes.

    It puts the blocks of the split in which token t's path has left its rows into scratch, and their addresses into
    the tile: the stored block first, for what it holds in place and finite numbers elsewhere, then row after row.
    """
    width = 2 if element == 2 else 4  # bytes of a token in a line of K

    @inline
    def copy_row(source, row, target, place, padded):
        for line in range(0, padded * element, width):
            k = BLOCK_TOKENS * line
            if width == 2:
                store_i16(target + k + width * place, load_u16(source + k + width * row))
            else:
                store_i32(target + k + width * place, load_i32(source + k + width * row))
        size = padded * element
        v = BLOCK_TOKENS * size
        if element > 1:
            for i in range(0, size, 8):
                store_i64(target + v + place * size + i, load_i64(source + v + row * size + i))
        else:
            for i in range(0, 4 * padded, 4):
                store_i8(value_at(target, place, padded) + i, load_i8(value_at(source, row, padded) + i))
            for scales in range(2 * v, 2 * v + 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS):
                store_i16(target + scales + 2 * place, load_u16(source + scales + 2 * row))

    @outlined
    def gather(rec, ctx, tile, unit, blocks, kv_head, padded):
        t, _h, split = unit
        first, mask, size = token(ctx, t, TOKEN_BASE), token(ctx, t, TOKEN_MASK), parameter(rec, ATTENTION.head_bytes)
        last, place = token(ctx, t, TOKEN_ROW), token(ctx, t, TOKEN_BASE)
        made, target = -1, tile + path_at(padded) - size
        for row in range(first, last + 1):
            if row < last and not mask >> (row - first) & 1:
                continue
            b = place // BLOCK_TOKENS
            if place < row and b // SPLIT_BLOCKS == split:
                if b != made:
                    made, target = b, target + size
                    stored = block_address(rec, blocks, kv_head, b)
                    for i in range(0, size, 64):
                        store_f32x16(target + i, load_f32x16(stored + i))
                    set_split_block(tile, kv_head, b - split * SPLIT_BLOCKS, target)
                source = block_address(rec, blocks, kv_head, row // BLOCK_TOKENS)
                copy_row(source, row % BLOCK_TOKENS, target, place % BLOCK_TOKENS, padded)
            place += 1

    return gather
