"""Addresses of the K and V that a token sees: its sequence's blocks, and in a tree the blocks of its path.

A tree's nodes are stored in order of arrival, so the rows of a path have gaps. A token with a mask goes through
attention by itself, over blocks in scratch that hold its path without the gaps: the blocks that its sequence would have
if it were that path. So the passes are the same as for any other token, and the bits those of the path run as a chain.
"""

from __future__ import annotations

from functools import cache

from ...abi import (
    BLOCK_TOKENS,
    CTX_SEQUENCES,
    FLAG_PRUNED,
    KV_SCALES_BYTES,
    SEQUENCE_BLOCKS,
    SEQUENCE_BYTES,
    TOKEN_BASE,
    TOKEN_MASK,
    TOKEN_ROW,
    TOKEN_SEQUENCE,
)
from ...parameters import ATTENTION
from ...vector.instruction import flags, inline, operand, outlined, parameter, token
from ...vector.memory import (
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
from ...vector.scalars import count_ones
from .attention_rows import T_KEYS, T_SCALES, T_VALUES, key_width, path_at, path_bytes


@inline
def block_table(inst, ctx, t):
    """Address of the block table of token t's sequence that the layer has."""
    sequence = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * token(ctx, t, TOKEN_SEQUENCE)
    return load_i64(sequence + SEQUENCE_BLOCKS + 8 * parameter(inst, ATTENTION.recent))


@inline
def block_parts(layer, kv_heads, n_blocks, size, h, block):
    """Addresses of K, V and scales of KV head h in a block; K and V of a head in a block have `size` bytes.

    Each is in a plane of its own, and there head by head the blocks of the pool (abi.BLOCK_TOKENS).
    """
    number = h * n_blocks + block
    values = layer + kv_heads * n_blocks * size
    return layer + number * size, values + number * size, 2 * values - layer + number * KV_SCALES_BYTES


@inline
def latent_parts(layer, n_blocks, size, block):
    """Return the `block_parts` of the one head of a layer that stores no V: K stands for it, until it is made of K."""
    keys = layer + block * size
    return keys, keys, layer + n_blocks * size + block * KV_SCALES_BYTES


@inline
def head_parts(inst, ctx, h):
    """Addresses of K, V and scales of KV head h in block 0."""
    kv_heads, n_blocks = parameter(inst, ATTENTION.kv_heads), parameter(inst, ATTENTION.blocks)
    size = parameter(inst, ATTENTION.block_bytes)
    if parameter(inst, ATTENTION.values):
        return latent_parts(operand(inst, ctx, 2), n_blocks, size, 0)
    return block_parts(operand(inst, ctx, 2), kv_heads, n_blocks, size, h, 0)


@inline
def sequence_block(inst, blocks, head, b):
    """Addresses of K, V and scales of block b of a sequence, of the head for which `head_parts` is given."""
    keys, values, scales = head
    number = load_i32(blocks + 4 * b)
    at = number * parameter(inst, ATTENTION.block_bytes)
    return keys + at, values + at, scales + number * KV_SCALES_BYTES


@inline
def value_at(values, row, padded):
    """Address of element 0 of a row in a block of V of int8; the next element is 4 bytes after it."""
    return values + (row >> 2) * 4 * padded + (row & 3)


@inline
def split_keys(tile, origin, b):
    """Address of K of block b of the split in work; `origin` is that of the KV head's K in block 0."""
    return origin + load_i64(tile + T_KEYS + 8 * b)


@inline
def split_values(tile, origin, b):
    """Address of V of block b of the split in work."""
    return origin + load_i64(tile + T_VALUES + 8 * b)


@inline
def split_scales(tile, origin, b):
    """Address of the scales of block b of the split in work."""
    return origin + load_i64(tile + T_SCALES + 8 * b)


@inline
def set_split_block(tile, origin, b, parts):
    """Say where block b of the split is. Distances from the KV head's K are kept: they make for the better loops."""
    keys, values, scales = parts
    store_i64(tile + T_KEYS + 8 * b, keys - origin)
    store_i64(tile + T_VALUES + 8 * b, values - origin)
    store_i64(tile + T_SCALES + 8 * b, scales - origin)


@inline
def layer_pruned(inst, ctx):
    """Address of the flags of rows of block 0 that the layer lacks, 0 if it has those of all tokens."""
    return operand(inst, ctx, 6) if flags(inst) & FLAG_PRUNED else 0


@inline
def has_path(ctx, t):
    """Return whether token t does not see all rows up to its own."""
    return token(ctx, t, TOKEN_MASK) != -1


@inline
def position_of(ctx, t):
    """Position of token t in its path: the row that it would have in a chain, and has where it has no mask."""
    row = token(ctx, t, TOKEN_ROW)
    if not has_path(ctx, t):
        return row
    base, position = token(ctx, t, TOKEN_BASE), token(ctx, t, TOKEN_BASE)
    ancestors = token(ctx, t, TOKEN_MASK) & ((1 << (row - base)) - 1)
    while ancestors != 0:
        ancestors &= ancestors - 1
        position += 1
    return position


@inline
def _in_work(mask, b):
    """Return whether bit b of the mask is set; it may be outside of it."""
    return 0 <= b < 8 * 8 and mask >> b & 1 != 0


@cache
def path_gather(element):
    """Make ``gather(inst, ctx, tile, t, first, mask, blocks, head, padded)`` for a stored type of this many bytes.

    In work are the blocks first + b of the context for each bit b of the mask, one after the other. Those in which
    token t's path has left its rows are put into scratch, and their addresses into the tile: the stored block first,
    for what it holds in place and finite numbers elsewhere, then row after row.
    """
    width = 2 if element == 2 else 4  # bytes of a token in a line of K

    @inline
    def copy_row(source, row, target, position, padded, wide):
        (keys, values, scales), (to_keys, to_values, to_scales), size = source, target, padded * element
        for line in range(0, wide * element, width):
            k = BLOCK_TOKENS * line
            if width == 2:
                store_i16(to_keys + k + width * position, load_u16(keys + k + width * row))
            else:
                store_i32(to_keys + k + width * position, load_i32(keys + k + width * row))
        if element > 1:
            for i in range(0, size, 8):
                store_i64(to_values + position * size + i, load_i64(values + row * size + i))
        else:
            for i in range(0, 4 * padded, 4):
                store_i8(value_at(to_values, position, padded) + i, load_i8(value_at(values, row, padded) + i))
            for of in range(0, KV_SCALES_BYTES, 2 * BLOCK_TOKENS):
                store_i16(to_scales + of + 2 * position, load_u16(scales + of + 2 * row))

    @inline
    def copy_block(source, target, size):
        for i in range(0, size, 64):
            store_f32x16(target[0] + i, load_f32x16(source[0] + i))
            store_f32x16(target[1] + i, load_f32x16(source[1] + i))
        if element == 1:
            store_f32x16(target[2], load_f32x16(source[2]))

    @outlined
    def gather(inst, ctx, tile, t, first, mask, blocks, head, padded):
        base, ancestors, last = token(ctx, t, TOKEN_BASE), token(ctx, t, TOKEN_MASK), token(ctx, t, TOKEN_ROW)
        position, size = base, parameter(inst, ATTENTION.block_bytes)
        made, room = -1, tile + path_at(padded) - path_bytes(size)
        for row in range(base, last + 1):
            if row < last and not ancestors >> (row - base) & 1:
                continue
            b = position // BLOCK_TOKENS
            if position < row and _in_work(mask, b - first):
                target = room, room + size, room + 2 * size
                if b != made:
                    made, room = b, room + path_bytes(size)
                    target = room, room + size, room + 2 * size
                    copy_block(sequence_block(inst, blocks, head, b), target, size)
                    set_split_block(tile, head[0], count_ones(mask & ((1 << (b - first)) - 1)), target)
                source = sequence_block(inst, blocks, head, row // BLOCK_TOKENS)
                copy_row(source, row % BLOCK_TOKENS, target, position % BLOCK_TOKENS, padded, key_width(inst))
            position += 1

    return gather
