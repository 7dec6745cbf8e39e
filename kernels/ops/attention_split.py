"""One split of the context for a tile of rows: scores, softmax, weighted sum of V, a pass each.

Each K line and V vector that is loaded serves all rows of the tile. Blocks lie anywhere, so the hardware cannot guess
the next one; the passes ask for memory themselves and keep the bus busy throughout: pass 1 reads K and asks for this
split's V, pass 3 reads V and asks for the K of the split that the thread takes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..abi import BLOCK_TOKENS, SPLIT_BLOCKS, TOKEN_ROW
from ..vector.chains import add_chains, dot_chains, sum_chains
from ..vector.int8_dot import scale_add, start_s8
from ..vector.record import inline, outlined, token
from ..vector.simd import (
    first_lane,
    lane_numbers,
    load_f32x16,
    load_i64,
    mask_outside,
    max_lanes,
    prefetch,
    splat_f32,
    store_f32,
    store_f32x16,
    vmax,
)
from ..vector.targets import fma_rows_f16, fma_rows_f32, fma_rows_i8, fma_splat, load_f16x16
from ..vector.tiles import load_lines, store_block, store_tile, zero_tile
from ..vector.vecmath import exp
from .attention_paths import (
    block_address,
    block_table,
    has_path,
    head_address,
    path_gather,
    set_split_block,
    split_block,
)
from .attention_rows import (
    LOWEST,
    SCORES,
    T_HIGH,
    T_L,
    T_LOW,
    T_M,
    T_OFFSET,
    T_Q,
    T_SCALE,
    acc_at,
    prepare_float,
    prepare_int8,
    scores_at,
)

AHEAD = 4
"""Blocks between the K in work and the K that is asked for, where the split before did not ask already."""

# -- scores of one block for a tile of r rows --------------------------------------------------------------------------


def _scores_int8(r, chains):
    @inline
    def scores(tile, block, ahead, padded):
        ints = add_chains(chains, start_s8(1, r, tile + T_OFFSET))
        v = block + BLOCK_TOKENS * padded
        for line in range(0, padded >> 2, chains):
            ints = dot_chains(ints, load_lines(chains, block + 64 * line, 64), tile + T_Q + 4 * r * line)
            for i in range(chains):
                prefetch(v + 64 * (line + i))
                prefetch(ahead + 64 * (line + i))
        prefetch(ahead + 2 * BLOCK_TOKENS * padded)
        k_scales = load_f16x16(block + 2 * BLOCK_TOKENS * padded)
        return scale_add(zero_tile(r), sum_chains(chains, ints), k_scales, tile + T_SCALE)

    return scores


def _scores_float(load, element):
    def make(r, chains):
        @inline
        def scores(tile, block, ahead, padded):
            acc = zero_tile(r)
            v = block + BLOCK_TOKENS * padded * element
            for d in range(padded):
                acc = fma_splat(acc, load(block + 16 * element * d), tile + T_Q + 4 * r * d, 4)
                prefetch(v + 16 * element * d)
                prefetch(ahead + 16 * element * d)
            return acc

        return scores

    return make


@inline
def _v_scales_int8(block, padded):
    """Scales of the 16 V rows."""
    return load_f16x16(block + 2 * BLOCK_TOKENS * padded + 2 * BLOCK_TOKENS)


@inline
def _v_scales_float(block, padded):
    """Float rows have none."""
    return splat_f32(1.0)


class KvKind(NamedTuple):
    """What differs between the stored types of K and V."""

    prepare: Callable[[int], Any]
    """Makes what puts a row's query into a tile of r rows: (tile, i, q, n, scale)."""
    scores: Callable[[int, int], Any]
    """Makes the scores of a block for r rows, in so many chains."""
    v_scales: Any
    fma_rows: Any
    element: int
    """Bytes of an element."""


KINDS = {
    "int8": KvKind(prepare_int8, _scores_int8, _v_scales_int8, fma_rows_i8, 1),
    "f16": KvKind(prepare_float, _scores_float(load_f16x16, 2), _v_scales_float, fma_rows_f16, 2),
    "f32": KvKind(prepare_float, _scores_float(load_f32x16, 4), _v_scales_float, fma_rows_f32, 4),
}

# -- weighted sums of V ------------------------------------------------------------------------------------------------


def _values(kind, r, widths):
    """Pass 3 for r rows: widths[0] vectors of each row at once while there are so many, then widths[1], at last 1.

    Every element is a sum in token order, whatever the width and the number of rows.
    """
    fma_rows, element, n = kind.fma_rows, kind.element, widths[0]
    size, lines = n * r, -(-16 * n * element // 64)

    @inline
    def some(rec, tile, span, padded, ahead, k):
        begin, end, base, kv_head = span
        next_blocks, next_head, last = ahead
        acc = zero_tile(size)
        for b in range(begin, end):
            v = split_block(tile, kv_head, b - base) + (BLOCK_TOKENS * padded + k) * element
            p = tile + scores_at(padded) + 64 * (b - base)
            keys = block_address(rec, next_blocks, next_head, min(b - base, last)) + k * element
            for j in range(BLOCK_TOKENS):
                acc = fma_rows(acc, r, v + j * padded * element, p + 4 * j, SCORES)
                for line in range(lines):
                    prefetch(keys + j * padded * element + 64 * line)
        store_block(n, acc, tile + acc_at(padded) + 4 * k, 4 * padded)

    if len(widths) == 1:

        @inline
        def values(rec, tile, span, padded, ahead, k):
            while k < padded:
                some(rec, tile, span, padded, ahead, k)
                k += 16

        return values

    rest = _values(kind, r, widths[1:])

    @inline
    def values_wide(rec, tile, span, padded, ahead, k):
        while k + 16 * n <= padded:
            some(rec, tile, span, padded, ahead, k)
            k += 16 * n
        rest(rec, tile, span, padded, ahead, k)

    return values_wide


# -- the passes --------------------------------------------------------------------------------------------------------


@outlined
def _mask_row(tile, i, at, first):
    """Scores of one block of row i: what the row does not see becomes LOWEST."""
    low = max(load_i64(tile + T_LOW + 8 * i) - first, 0)
    high = min(load_i64(tile + T_HIGH + 8 * i) - first, BLOCK_TOKENS - 1)
    if low > 0 or high < BLOCK_TOKENS - 1:
        store_f32x16(at, mask_outside(load_f32x16(at), lane_numbers(), low, high, first_lane(splat_f32(LOWEST))))


def split_step(kind, r, widths, chains):
    """Make the step of a tile of r rows: (m, l, acc) of the blocks of one split that any of them sees.

    ``step(rec, ctx, tile, (t, h, split), low, high, padded, ahead)``: `ahead` is what the thread does next.
    """
    scores, v_scales, values = kind.scores(r, chains), kind.v_scales, _values(kind, r, widths)
    gather = path_gather(kind.element)

    @inline
    def score(tile, span, padded):
        """Pass 1: scores of blocks begin .. end, block b of the split at 64 (b - base)."""
        begin, end, base, kv_head = span
        all_from, all_to = load_i64(tile + T_LOW + 8 * (r - 1)), load_i64(tile + T_HIGH)  # what every row sees
        for b in range(begin, end):
            ahead = split_block(tile, kv_head, min(b + AHEAD, end - 1) - base)
            at = tile + scores_at(padded) + 64 * (b - base)
            store_tile(scores(tile, split_block(tile, kv_head, b - base), ahead, padded), at, SCORES)
            first = b * BLOCK_TOKENS
            if first < all_from or first + BLOCK_TOKENS - 1 > all_to:
                for i in range(r):
                    _mask_row(tile, i, at + SCORES * i, first)

    @outlined
    def softmax(tile, i, span, padded):
        """Pass 2: scores of row i to weights (times the V scales), their largest and their sum."""
        begin, end, base, kv_head = span
        row = tile + scores_at(padded) + SCORES * i
        top = load_f32x16(row + 64 * (begin - base))
        for b in range(begin + 1, end):
            top = vmax(top, load_f32x16(row + 64 * (b - base)))
        m = max_lanes(top)
        total = splat_f32(0.0)
        for b in range(begin, end):
            p = exp(load_f32x16(row + 64 * (b - base)) - splat_f32(m))
            total = total + p
            store_f32x16(row + 64 * (b - base), p * v_scales(split_block(tile, kv_head, b - base), padded))
        store_f32(tile + T_M + 4 * i, m)
        store_f32x16(tile + T_L + 64 * i, total)

    @outlined
    def step(rec, ctx, tile, unit, low, high, padded, ahead):
        t, h, split = unit
        base = split * SPLIT_BLOCKS
        begin, end = max(base, low >> 4), min(base + SPLIT_BLOCKS, (high >> 4) + 1)
        blocks, kv_head = block_table(ctx, t), head_address(rec, ctx, h)
        span = begin, end, base, kv_head
        for b in range(begin, end):
            set_split_block(tile, kv_head, b - base, block_address(rec, blocks, kv_head, b))
        if has_path(ctx, t):
            gather(rec, ctx, tile, unit, blocks, kv_head, padded)
        score(tile, span, padded)
        for i in range(r):
            softmax(tile, i, span, padded)
        next_t, next_h, next_split = ahead
        first = SPLIT_BLOCKS * next_split
        last = (token(ctx, next_t, TOKEN_ROW) >> 4) - first
        values(rec, tile, span, padded, (block_table(ctx, next_t) + 4 * first, head_address(rec, ctx, next_h), last), 0)

    return step
