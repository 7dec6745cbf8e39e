"""One split of the context for a tile of rows: scores, softmax, weighted sum of V, a pass each.

Each K line and V vector that is loaded serves all rows of the tile. Blocks are anywhere, so the hardware cannot predict
the next one; the passes ask for memory themselves and keep the bus busy throughout: pass 1 reads K and asks for this
split's V, pass 3 reads V and asks for the K of the split that the thread takes next.
"""

from __future__ import annotations

from functools import cache

from ...abi import ATTENTION_TILE, BLOCK_TOKENS, FLAG_ALIBI, FLAG_ALIBI_BF16, SPLIT_BLOCKS, TOKEN_ROW
from ...parameters import ATTENTION
from ...vector.instruction import flags, float_parameter, inline, outlined, parameter, token
from ...vector.lanes import (
    first_lane,
    lane_numbers,
    mask_flagged,
    mask_outside,
    max_lanes,
    round_to_bf16,
    splat_f32,
    splat_i32,
    to_f32,
    vmax,
)
from ...vector.memory import load_f32, load_f32x16, load_i32, load_i64, prefetch, store_f32, store_f32x16
from ...vector.scalars import div_i64
from ...vector.targets import fma
from ...vector.tiles import add_block, store_block, store_tile
from ...vector.vecmath import exp_below, soft_cap
from .attention_kinds import IN_A_ROW
from .attention_latent import turned_values
from .attention_paths import (
    block_table,
    has_path,
    head_parts,
    layer_pruned,
    path_gather,
    sequence_block,
    set_split_block,
    split_keys,
    split_scales,
    split_values,
)
from .attention_rows import LOWEST, SCORES, T_L, T_M, T_SCORES, T_WEIGHT, acc_at, bounds_at, key_width, slopes_at

AHEAD = 4
"""Blocks between the K in work and the K that is requested, where the split before did not ask already."""


def value_step(kind, r, widths, ahead_of):
    """Pass 3 for r rows: widths[0] vectors of each row at once while there are this many, then widths[1], at last 1.

    ``ahead_of(inst, tile, span, ahead, b)[0]`` is where the requested memory begins while block b is in work.

    Every element is a sum in token order, part after part, whatever the width and the number of rows.
    """
    (start, add, finish), part, n = kind.sums(r, widths[0]), kind.part, widths[0]

    @inline
    def some(inst, tile, span, padded, ahead, k):
        begin, end, base, origin = span
        at = tile + acc_at(padded) + 4 * k
        for first in range(begin - begin % part, end, part):
            acc = start()
            for b in range(max(first, begin), min(first + part, end)):
                wanted = ahead_of(inst, tile, span, ahead, b)[0]
                acc = add(acc, tile, b - base, split_values(tile, origin, b - base), wanted, k, padded)
            sums = finish(acc, tile + T_WEIGHT + 4 * ATTENTION_TILE * div_i64(first - base, part))
            if first > begin:
                sums = add_block(n, sums, at, 4 * padded, IN_A_ROW)
            store_block(n, sums, at, 4 * padded)

    if len(widths) == 1:

        @inline
        def values(inst, tile, span, padded, ahead, k):
            while k < padded:
                some(inst, tile, span, padded, ahead, k)
                k += 16

        return values

    rest = value_step(kind, r, widths[1:], ahead_of)

    @inline
    def values_wide(inst, tile, span, padded, ahead, k):
        while k + 16 * n <= padded:
            some(inst, tile, span, padded, ahead, k)
            k += 16 * n
        rest(inst, tile, span, padded, ahead, k)

    return values_wide


@outlined
def _mask_row(bounds, at, first):
    """Scores of one block of a row: positions that the row does not see become LOWEST."""
    low = max(load_i64(bounds) - first, 0)
    high = min(load_i64(bounds + 8) - first, BLOCK_TOKENS - 1)
    if low > 0 or high < BLOCK_TOKENS - 1:
        store_f32x16(at, mask_outside(load_f32x16(at), lane_numbers(), low, high, first_lane(splat_f32(LOWEST))))


@inline
def _rounded_bias(slope, positions):
    """Slope x position with each factor and the product in bfloat16."""
    return round_to_bf16(slope * round_to_bf16(to_f32(positions)))


@outlined
def _edit_scores(inst, queries, at, r, first):
    """Scores of one block of r rows: none beyond the cap (Gemma 2, arXiv 2408.00118); then ALiBi (arXiv 2108.12409),
    the head's slope times how far the key is after the query."""
    if parameter(inst, ATTENTION.cap):
        for i in range(r):
            row = at + SCORES * i
            store_f32x16(row, soft_cap(load_f32x16(row), float_parameter(inst, ATTENTION.cap)))
    if flags(inst) & FLAG_ALIBI:
        keys = lane_numbers() + splat_i32(first)
        for i in range(r):
            row, slope = at + SCORES * i, splat_f32(load_f32(slopes_at(queries, r) + 4 * i))
            position = splat_i32(load_i64(bounds_at(queries, r, i) + 8))
            if flags(inst) & FLAG_ALIBI_BF16:
                bias = _rounded_bias(slope, keys) - _rounded_bias(slope, position)
                score = fma(bias, splat_f32(float_parameter(inst, ATTENTION.scale)), load_f32x16(row))
            else:
                score = fma(slope, to_f32(keys - position), load_f32x16(row))
            store_f32x16(row, score)


_ALL_GONE = 0x0101010101010101
"""Eight rows that a layer lacks (abi.FLAG_PRUNED)."""


@inline
def _gone(pruned):
    """Return whether the layer has no row of a block."""
    return load_i64(pruned) == _ALL_GONE and load_i64(pruned + 8) == _ALL_GONE


@outlined
def mask_pruned(at, r, pruned):
    """Scores of one block of r rows: those of rows that the layer lacks become LOWEST, whether they were computed or
    not."""
    if load_i64(pruned) | load_i64(pruned + 8):
        for i in range(r):
            row = at + SCORES * i
            store_f32x16(row, mask_flagged(load_f32x16(row), pruned, first_lane(splat_f32(LOWEST))))


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
def _ask(address):
    """Ask for V that pass 3 will want."""
    prefetch(address)


@inline
def _ask_not(address):
    """Leave V where it is."""


@inline
def _in_split(inst, tile, span, ahead, b):
    """K and scales that pass 1 asks for where pass 3 of the split before did not: a few blocks on in this split."""
    _begin, end, base, origin = span
    wanted = min(b + AHEAD, end - 1) - base
    return split_keys(tile, origin, wanted), split_scales(tile, origin, wanted)


@inline
def _in_next(inst, tile, span, ahead, b):
    """K and scales of the split that comes next."""
    blocks, head, last = ahead
    keys, _values, scales = sequence_block(inst, blocks, head, min(b - span[2], last))
    return keys, scales


@inline
def following(inst, ctx, unit):
    """(block table, parts of the KV head, last block) of the split that a thread takes next."""
    t, h, split = unit
    first = SPLIT_BLOCKS * split
    return block_table(inst, ctx, t) + 4 * first, head_parts(inst, ctx, h), (token(ctx, t, TOKEN_ROW) >> 4) - first


def score_step(kind, r, chains, alone):
    """Make pass 1 of a tile of r rows: scores of the blocks of one split that any of them sees; `alone`, without V.

    ``score(inst, ctx, tile, queries, (t, h, split), seen, padded, ahead)``: t is one of its tokens, `seen` comes from
    `positions_seen`, `ahead` from `following`. Returns the blocks: (begin, end, first of the split, K of the KV head).
    """
    scores, gather = kind.scores(r, chains, _ask_not if alone else _ask), path_gather(kind.element)
    ahead_of = _in_next if alone else _in_split

    @inline
    def score(inst, ctx, tile, queries, unit, seen, padded, ahead):
        t, h, split = unit
        low, high, all_from, all_to = seen
        base = split * SPLIT_BLOCKS
        begin, end = max(base, low >> 4), min(base + SPLIT_BLOCKS, (high >> 4) + 1)
        blocks, head = block_table(inst, ctx, t), head_parts(inst, ctx, h)
        origin = head[0]
        span = begin, end, base, origin
        for b in range(begin, end):
            set_split_block(tile, origin, b - base, sequence_block(inst, blocks, head, b))
        if has_path(ctx, t):
            gather(inst, ctx, tile, t, base, (1 << SPLIT_BLOCKS) - 1, blocks, head, padded)
        pruned = layer_pruned(inst, ctx)
        for b in range(begin, end):
            at = tile + T_SCORES + 64 * (b - base)
            parts = (split_keys(tile, origin, b - base), split_values(tile, origin, b - base),
                     split_scales(tile, origin, b - base))
            gone = pruned + BLOCK_TOKENS * load_i32(blocks + 4 * b)
            if pruned == 0 or not _gone(gone):
                store_tile(scores(queries, parts, ahead_of(inst, tile, span, ahead, b), key_width(inst)),
                           at, SCORES)
                if parameter(inst, ATTENTION.edits):
                    _edit_scores(inst, queries, at, r, b * BLOCK_TOKENS)
            if pruned != 0:
                mask_pruned(at, r, gone)
            first = b * BLOCK_TOKENS
            if first < all_from or first + BLOCK_TOKENS - 1 > all_to:
                for i in range(r):
                    _mask_row(bounds_at(queries, r, i), at + SCORES * i, first)
        return span

    return score


def split_step(kind, r, widths, chains):
    """Make the step of a tile of r rows: (m, l, acc) of the blocks of one split that any of them sees.

    ``step(inst, ctx, tile, queries, unit, seen, padded, ahead)`` as in `score_step`, `ahead` the unit that comes next.
    """
    score, softmax = score_step(kind, r, chains, False), softmax_step(kind)
    values, turn = value_step(kind, r, widths, _in_next), turned_values(kind.element)

    @outlined
    def step(inst, ctx, tile, queries, unit, seen, padded, ahead):
        coming = following(inst, ctx, ahead)
        span = score(inst, ctx, tile, queries, unit, seen, padded, coming)
        if parameter(inst, ATTENTION.values):
            turn(inst, ctx, tile, unit[0], span, padded)
        for i in range(r):
            softmax(tile, i, span)
        values(inst, tile, span, padded, coming, 0)

    return step
