"""Latent KV (MLA, arXiv 2405.04434): V is the beginning of K, so a block stores K and no V.

The passes of attention want K by lines of 16 tokens, and V by rows. Of each split the thread makes these rows of the
lines that it has just read, in its scratch: memory is read once. Tiles of rows that follow each other
in one split share them.
"""

from __future__ import annotations

from functools import cache

from ...abi import BLOCK_TOKENS
from ...parameters import ATTENTION
from ...vector.instruction import inline, outlined, parameter
from ...vector.memory import load_i64, store_i64
from ...vector.transpose import turn_i8, turn_i16, turn_i32
from .attention_paths import block_table, has_path, split_keys
from .attention_rows import T_TURNED, T_VALUES


@cache
def turned_values(element):
    """Make ``turn(inst, ctx, tile, t, span, padded)``, for a stored type of this many bytes.

    It says of all blocks of a span where their V is: in scratch, made of their K.
    """
    if element == 1:
        @inline
        def turn_block(keys, values, padded):
            for k in range(0, padded, 16):
                for four in range(4):
                    turn_i8(keys + 16 * k + 16 * four, values + 4 * padded * four + 4 * k)
    else:
        lines = turn_i16 if element == 2 else turn_i32

        @inline
        def turn_block(keys, values, padded):
            for k in range(0, padded, 4):
                lines(keys + BLOCK_TOKENS * element * k, values + element * k, element * padded)

    @outlined
    def turn(inst, ctx, tile, t, span, padded):
        begin, end, base, origin = span
        room, size = tile + parameter(inst, ATTENTION.turned), BLOCK_TOKENS * element * padded
        table, held = block_table(inst, ctx, t) + 4 * base, tile + T_TURNED
        whole = not has_path(ctx, t)
        there = whole and load_i64(held) == table and load_i64(held + 8) <= begin and end <= load_i64(held + 16)
        for b in range(begin, end):
            values = room + (b - base) * size
            if not there:
                turn_block(split_keys(tile, origin, b - base), values, padded)
            store_i64(tile + T_VALUES + 8 * (b - base), values - origin)
        if not there:
            store_i64(held, table if whole else 0)
            store_i64(held + 8, begin)
            store_i64(held + 16, end)

    return turn
