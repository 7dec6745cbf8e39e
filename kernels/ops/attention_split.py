"""One split of the context for a tile of rows: scores, softmax, weighted sum of V, a pass each.

Each K line and V vector that is loaded serves all rows of the tile. Blocks lie anywhere, so the hardware cannot guess
the next one; the passes ask for memory themselves and keep the bus busy throughout: pass 1 reads K and asks for this
split's V, pass 3 reads V and asks for the K of the split that the thread takes next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..abi import ATTENTION_TILE, BLOCK_TOKENS, SPLIT_BLOCKS, TOKEN_ROW
from ..parameters import ATTENTION
from ..vector.chains import add_chains, dot_chains, sum_chains
from ..vector.int8_dot import scale_add, start_s8
from ..vector.record import float_parameter, inline, outlined, parameter, token
from ..vector.simd import (
    div_f32,
    div_i64,
    first_lane,
    lane_numbers,
    load_f32x16,
    load_i32,
    load_i64,
    mask_flagged,
    mask_outside,
    max_f32,
    max_lanes,
    prefetch,
    splat_f32,
    store_f32,
    store_f32x16,
    vmax,
)
from ..vector.targets import fma_rows_f16, fma_rows_f32, fma_splat, load_f16x16
from ..vector.tiles import add_block, load_lines, store_block, store_tile, zero_tile
from ..vector.vecmath import exp_below, soft_cap
from ..vector.weighted import WEIGHT_MAX, add_weighted, scale_sums, store_weights, zero_sums
from .attention_latent import turned_values
from .attention_paths import (
    block_table,
    has_path,
    head_parts,
    layer_holes,
    path_gather,
    sequence_block,
    set_split_block,
    split_keys,
    split_scales,
    split_values,
)
from .attention_rows import (
    LOWEST,
    SCORES,
    T_L,
    T_M,
    T_SCORES,
    T_WEIGHT,
    WEIGHT_BLOCKS,
    acc_at,
    bounds_at,
    elements_at,
    key_width,
    offsets_at,
    prepare_float,
    prepare_int8,
)

_IN_A_ROW = 64, 128
"""Lines that follow each other, as row tiles (simd.row_tile)."""
AHEAD = 4
"""Blocks between the K in work and the K that is asked for, where the split before did not ask already."""

# -- scores of one block for a tile of r rows --------------------------------------------------------------------------


@inline
def _ask(address):
    """Ask for V that pass 3 will want."""
    prefetch(address)


@inline
def _ask_not(address):
    """Leave V where it is."""


def _scores_int8(r, chains, ask_v):
    @inline
    def scores(queries, parts, ahead, padded):
        keys, values, scales = parts
        keys_ahead, scales_ahead = ahead
        ints = add_chains(chains, start_s8(1, r, offsets_at(queries, r)))
        for line in range(0, padded >> 2, chains):
            lines = load_lines(chains, keys + 64 * line, _IN_A_ROW)
            ints = dot_chains(ints, lines, elements_at(queries, r) + 4 * r * line)
            for i in range(chains):
                ask_v(values + 64 * (line + i))
                prefetch(keys_ahead + 64 * (line + i))
        prefetch(scales_ahead)
        return scale_add(zero_tile(r), sum_chains(chains, ints), load_f16x16(scales), queries)

    return scores


def _scores_float(load, element):
    def make(r, chains, ask_v):
        @inline
        def scores(queries, parts, ahead, padded):
            keys, values, _scales = parts
            keys_ahead, _scales_ahead = ahead
            acc = zero_tile(r)
            for d in range(padded):
                acc = fma_splat(acc, load(keys + 16 * element * d), elements_at(queries, r) + 4 * r * d, 4)
                ask_v(values + 16 * element * d)
                prefetch(keys_ahead + 16 * element * d)
            return acc

        return scores

    return make


@inline
def _v_scales_int8(scales):
    """Scales of the 16 V rows."""
    return load_f16x16(scales + 2 * BLOCK_TOKENS)


@inline
def _v_scales_float(scales):
    """Float rows have none."""
    return splat_f32(1.0)


# -- weights of a split's rows of V, and their sums --------------------------------------------------------------------


@inline
def _round_weights(tile, i, row, first, last, largest):
    """With int8 KV weights have 7 bits and one scale for a row and part, so that sums are exact, four products a lane.

    The scale is that of the largest weight. What a row does not see has weight 0, so other rows of the tile do not
    matter; nor do they below, because integers add up the same in any order.
    """
    top = max_f32(max_lanes(largest), first_lane(splat_f32(1e-30)))
    scale = tile + T_WEIGHT + 4 * (ATTENTION_TILE * div_i64(first, WEIGHT_BLOCKS) + i)
    store_f32(scale, first_lane(splat_f32(top) * splat_f32(1.0 / WEIGHT_MAX)))
    inverse = splat_f32(div_f32(first_lane(splat_f32(1.0 * WEIGHT_MAX)), top))
    for b in range(first, last):
        store_weights(row + 16 * b, load_f32x16(row + 64 * b) * inverse)


@inline
def _keep_weights(tile, i, row, first, last, largest):
    """With KV in floats weights stay as they are."""


def _sums_int8(r, n):
    size = n * r

    @inline
    def start():
        return zero_sums(size)

    @inline
    def add(acc, tile, b, values, ahead, k, padded):
        for line in range(4 * n):
            prefetch(ahead + 16 * k + 64 * line)
        return add_weighted(acc, r, values + 4 * k, 4 * padded, tile + T_SCORES + 16 * b, SCORES)

    @inline
    def end(acc, scales):
        return scale_sums(acc, r, scales)

    return start, add, end


def _sums_float(fma_rows, element):
    def make(r, n):
        size, lines = n * r, -(-16 * n * element // 64)

        @inline
        def start():
            return zero_tile(size)

        @inline
        def add(acc, tile, b, values, ahead, k, padded):
            p = tile + T_SCORES + 64 * b
            for j in range(BLOCK_TOKENS):
                at = (k + j * padded) * element
                acc = fma_rows(acc, r, values + at, p + 4 * j, SCORES)
                for line in range(lines):
                    prefetch(ahead + at + 64 * line)
            return acc

        @inline
        def end(acc, scales):
            return acc

        return start, add, end

    return make


class KvKind(NamedTuple):
    """What differs between the stored types of K and V."""

    prepare: Callable[[int], Any]
    """Makes what puts a row's query into a tile of r rows: (queries, i, q, n, scale)."""
    scores: Callable[[int, int, Any], Any]
    """Makes the scores of a block for r rows, in so many chains, and says how V is asked for meanwhile."""
    v_scales: Any
    weigh: Any
    """Gives the weights of a part the form that the sums want."""
    part: int
    """Blocks of a part."""
    sums: Callable[[int, int], Any]
    """Makes the steps of weighted sums for r rows and n vectors of V: start of a part, a block, end of a part."""
    element: int
    """Bytes of an element."""


KINDS = {
    "int8": KvKind(prepare_int8, _scores_int8, _v_scales_int8, _round_weights, WEIGHT_BLOCKS,
                   _sums_int8, 1),
    "f16": KvKind(prepare_float, _scores_float(load_f16x16, 2), _v_scales_float, _keep_weights, SPLIT_BLOCKS,
                  _sums_float(fma_rows_f16, 2), 2),
    "f32": KvKind(prepare_float, _scores_float(load_f32x16, 4), _v_scales_float, _keep_weights, SPLIT_BLOCKS,
                  _sums_float(fma_rows_f32, 4), 4),
}


def value_step(kind, r, widths, ahead_of):
    """Pass 3 for r rows: widths[0] vectors of each row at once while there are so many, then widths[1], at last 1.

    ``ahead_of(rec, tile, span, ahead, b)[0]`` is where what is asked for begins while block b is in work.

    Every element is a sum in token order, part after part, whatever the width and the number of rows.
    """
    (start, add, finish), part, n = kind.sums(r, widths[0]), kind.part, widths[0]

    @inline
    def some(rec, tile, span, padded, ahead, k):
        begin, end, base, origin = span
        at = tile + acc_at(padded) + 4 * k
        for first in range(begin - begin % part, end, part):
            acc = start()
            for b in range(max(first, begin), min(first + part, end)):
                wanted = ahead_of(rec, tile, span, ahead, b)[0]
                acc = add(acc, tile, b - base, split_values(tile, origin, b - base), wanted, k, padded)
            sums = finish(acc, tile + T_WEIGHT + 4 * ATTENTION_TILE * div_i64(first - base, part))
            if first > begin:
                sums = add_block(n, sums, at, 4 * padded, _IN_A_ROW)
            store_block(n, sums, at, 4 * padded)

    if len(widths) == 1:

        @inline
        def values(rec, tile, span, padded, ahead, k):
            while k < padded:
                some(rec, tile, span, padded, ahead, k)
                k += 16

        return values

    rest = value_step(kind, r, widths[1:], ahead_of)

    @inline
    def values_wide(rec, tile, span, padded, ahead, k):
        while k + 16 * n <= padded:
            some(rec, tile, span, padded, ahead, k)
            k += 16 * n
        rest(rec, tile, span, padded, ahead, k)

    return values_wide


# -- the passes --------------------------------------------------------------------------------------------------------


@outlined
def _mask_row(bounds, at, first):
    """Scores of one block of a row: what the row does not see becomes LOWEST."""
    low = max(load_i64(bounds) - first, 0)
    high = min(load_i64(bounds + 8) - first, BLOCK_TOKENS - 1)
    if low > 0 or high < BLOCK_TOKENS - 1:
        store_f32x16(at, mask_outside(load_f32x16(at), lane_numbers(), low, high, first_lane(splat_f32(LOWEST))))


@outlined
def _cap_scores(at, r, cap):
    """Scores of one block of r rows: none beyond the cap (Gemma 2, arXiv 2408.00118)."""
    for i in range(r):
        store_f32x16(at + SCORES * i, soft_cap(load_f32x16(at + SCORES * i), cap))


_ALL_GONE = 0x0101010101010101
"""Eight rows that a layer lacks (abi.FLAG_HOLES)."""


@inline
def _gone(holes):
    """Whether the layer has no row of a block."""
    return load_i64(holes) == _ALL_GONE and load_i64(holes + 8) == _ALL_GONE


@outlined
def mask_holes(at, r, holes):
    """Scores of one block of r rows: those of what the layer lacks become LOWEST, whether they were computed or not."""
    if load_i64(holes) | load_i64(holes + 8):
        for i in range(r):
            row = at + SCORES * i
            store_f32x16(row, mask_flagged(load_f32x16(row), holes, first_lane(splat_f32(LOWEST))))


@cache
def softmax_step(kind):
    """Make pass 2 for a stored type."""
    v_scales, weigh, part = kind.v_scales, kind.weigh, kind.part

    @outlined
    def softmax(tile, i, span):
        """Scores of row i to weights (times the V scales), their largest and their sum."""
        begin, end, base, origin = span
        row = tile + T_SCORES + SCORES * i
        top = load_f32x16(row + 64 * (begin - base))
        for b in range(begin + 1, end):
            top = vmax(top, load_f32x16(row + 64 * (b - base)))
        m = max_lanes(top)
        total = splat_f32(0.0)
        for first in range(begin - begin % part, end, part):
            low, high, largest = max(first, begin), min(first + part, end), splat_f32(0.0)
            for b in range(low, high):
                p = exp_below(load_f32x16(row + 64 * (b - base)) - splat_f32(m))
                total = total + p
                weight = p * v_scales(split_scales(tile, origin, b - base))
                largest = vmax(largest, weight)
                store_f32x16(row + 64 * (b - base), weight)
            weigh(tile, i, row, low - base, high - base, largest)
        store_f32(tile + T_M + 4 * i, m)
        store_f32x16(tile + T_L + 64 * i, total)

    return softmax


@inline
def _in_split(rec, tile, span, ahead, b):
    """K and scales that pass 1 asks for where pass 3 of the split before did not: a few blocks on in this split."""
    _begin, end, base, origin = span
    wanted = min(b + AHEAD, end - 1) - base
    return split_keys(tile, origin, wanted), split_scales(tile, origin, wanted)


@inline
def _in_next(rec, tile, span, ahead, b):
    """K and scales of the split that comes next."""
    blocks, head, last = ahead
    keys, _values, scales = sequence_block(rec, blocks, head, min(b - span[2], last))
    return keys, scales


@inline
def following(rec, ctx, unit):
    """(block table, parts of the KV head, last block) of the split that a thread takes next."""
    t, h, split = unit
    first = SPLIT_BLOCKS * split
    return block_table(rec, ctx, t) + 4 * first, head_parts(rec, ctx, h), (token(ctx, t, TOKEN_ROW) >> 4) - first


def score_step(kind, r, chains, alone):
    """Make pass 1 of a tile of r rows: scores of the blocks of one split that any of them sees; `alone`, without V.

    ``score(rec, ctx, tile, queries, (t, h, split), seen, padded, ahead)``: t is one of its tokens, `seen` comes from
    `places_seen`, `ahead` from `following`. Returns the blocks: (begin, end, first of the split, K of the KV head).
    """
    scores, gather = kind.scores(r, chains, _ask_not if alone else _ask), path_gather(kind.element)
    ahead_of = _in_next if alone else _in_split

    @inline
    def score(rec, ctx, tile, queries, unit, seen, padded, ahead):
        t, h, split = unit
        low, high, all_from, all_to = seen
        base = split * SPLIT_BLOCKS
        begin, end = max(base, low >> 4), min(base + SPLIT_BLOCKS, (high >> 4) + 1)
        blocks, head = block_table(rec, ctx, t), head_parts(rec, ctx, h)
        origin = head[0]
        span = begin, end, base, origin
        for b in range(begin, end):
            set_split_block(tile, origin, b - base, sequence_block(rec, blocks, head, b))
        if has_path(ctx, t):
            gather(rec, ctx, tile, t, base, (1 << SPLIT_BLOCKS) - 1, blocks, head, padded)
        holes = layer_holes(rec, ctx)
        for b in range(begin, end):
            at = tile + T_SCORES + 64 * (b - base)
            parts = (split_keys(tile, origin, b - base), split_values(tile, origin, b - base),
                     split_scales(tile, origin, b - base))
            gone = holes + BLOCK_TOKENS * load_i32(blocks + 4 * b)
            if holes == 0 or not _gone(gone):
                store_tile(scores(queries, parts, ahead_of(rec, tile, span, ahead, b), key_width(rec)),
                           at, SCORES)
                if parameter(rec, ATTENTION.cap):
                    _cap_scores(at, r, float_parameter(rec, ATTENTION.cap))
            if holes != 0:
                mask_holes(at, r, gone)
            first = b * BLOCK_TOKENS
            if first < all_from or first + BLOCK_TOKENS - 1 > all_to:
                for i in range(r):
                    _mask_row(bounds_at(queries, r, i), at + SCORES * i, first)
        return span

    return score


def split_step(kind, r, widths, chains):
    """Make the step of a tile of r rows: (m, l, acc) of the blocks of one split that any of them sees.

    ``step(rec, ctx, tile, queries, unit, seen, padded, ahead)`` as in `score_step`, `ahead` the unit that comes next.
    """
    score, softmax = score_step(kind, r, chains, False), softmax_step(kind)
    values, turn = value_step(kind, r, widths, _in_next), turned_values(kind.element)

    @outlined
    def step(rec, ctx, tile, queries, unit, seen, padded, ahead):
        coming = following(rec, ctx, ahead)
        span = score(rec, ctx, tile, queries, unit, seen, padded, coming)
        if parameter(rec, ATTENTION.values):
            turn(rec, ctx, tile, unit[0], span, padded)
        for i in range(r):
            softmax(tile, i, span)
        values(rec, tile, span, padded, coming, 0)

    return step
