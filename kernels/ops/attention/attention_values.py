"""Weighted sum of the blocks of V in which some head of a KV head selects a row; no other V is read.

All rows of a block that is read count with their weights: omitting some would save nothing. Units of work are stretches
of a few splits. The selected blocks of a stretch are moved together and go, as many as a split has at a time, through
passes 2 and 3 of attention as if they were a split, whose partial result they leave; the last splits of a stretch may
be empty. If a head selects all rows, splits stay separate, and the partial results have the bits of attention's. Each
token is processed by itself, so that its bits do not depend on the others' selections. While blocks are summed, the
next ones are prefetched.

Omitted rows are replaced by a mean of V, over blocks that are evenly spread over the context up to MASK_TOKENS before
the token. They follow from its position alone, and no draft token of its pass is among them: no state has to be kept
for a sequence.

Operands: 2 the layer's blocks, 3 scratch, 4 partial results, beginning with those of the first wanted token, 5 rows of
scores with the selection, 6 as in attention.py, 7 means: a row of floats for each token and KV head, then the number of
rows it covers. Parameters: parameters.ATTENTION. Reference: reference/attention/attention_values.py.
"""

from __future__ import annotations

from ...abi import (
    BLOCK_TOKENS,
    COUNT_TOKENS,
    CTX_VALUES,
    INSTEAD_MEAN,
    MASK_TOKENS,
    MEAN_BLOCKS,
    SPLIT_BLOCKS,
    STRETCH_SPLITS,
)
from ...parameters import ATTENTION
from ...registry import kernel
from ...vector.instruction import claim, count, inline, operand, outlined, parameter, round_up_16
from ...vector.lanes import first_lane, splat_f32, sum_lanes
from ...vector.memory import load_f32, load_f32x16, load_i32, load_i64, prefetch, store_f32, store_f32x16, store_i64
from ...vector.scalars import count_ones, div_f32, div_i64, trailing_zeros
from ...vector.targets import atomic_add, attention_tiles
from .attention import leave_partial
from .attention_kinds import KINDS
from .attention_paths import (
    block_table,
    has_path,
    head_parts,
    layer_pruned,
    path_gather,
    position_of,
    sequence_block,
    set_split_block,
    split_keys,
    split_scales,
    split_values,
)
from .attention_rows import (
    LOWEST,
    SCORES,
    SPLIT_SHIFT,
    T_CHOSEN,
    T_KEYS,
    T_L,
    T_M,
    T_SCORES,
    T_UNIT,
    T_VALUES,
    acc_at,
    first_visible,
    partial_bytes,
)
from .attention_scores import first_scored, score_row
from .attention_select import all_wanted, choice_at, wanted_of_split
from .attention_split import mask_pruned, softmax_step, value_step
from .attention_units import few_tokens

STRETCH_SHIFT = SPLIT_SHIFT + STRETCH_SPLITS.bit_length() - 1
_SPLIT = (1 << SPLIT_BLOCKS) - 1
"""Bits of the blocks of a stretch's first split."""
AHEAD = 2
"""Blocks of a mean between the V in work and the V that is requested."""


@inline
def _splits(inst, ctx, t, stretch):
    """The splits of a stretch that token t sees: the first, and the one after the last."""
    high, first = position_of(ctx, t), stretch * STRETCH_SPLITS
    begin, end = first_visible(inst, high) >> SPLIT_SHIFT, (high >> SPLIT_SHIFT) + 1
    return max(first, begin), min(first + STRETCH_SPLITS, end)


@outlined
def _wanted_blocks(inst, ctx, t, h, stretch, group):
    """Bit b: some head of KV head h needs a row of block b of the stretch."""
    begin, end = _splits(inst, ctx, t, stretch)
    found = 0
    for head in range(h * group, (h + 1) * group):
        row = score_row(inst, ctx, t, head)
        choice = choice_at(inst, row)
        for split in range(begin, end):
            found |= wanted_of_split(inst, row, choice, split) << SPLIT_BLOCKS * (split - stretch * STRETCH_SPLITS)
    return found


@inline
def _chosen(inst, ctx, tile, unit, group):
    """`_wanted_blocks` of a unit of work, found once: when it is in work, or when the unit before it was."""
    t, h, stretch = unit
    number = (t * parameter(inst, ATTENTION.kv_heads) + h) * parameter(inst, ATTENTION.splits) + stretch
    if load_i64(tile + T_UNIT) != number:
        store_i64(tile + T_CHOSEN, _wanted_blocks(inst, ctx, t, h, stretch, group))
        store_i64(tile + T_UNIT, number)
    return load_i64(tile + T_CHOSEN)


@outlined
def _first_blocks(chosen):
    """Return the number of a split's blocks among those left of a stretch."""
    rest = chosen
    for _ in range(SPLIT_BLOCKS):
        rest &= rest - 1
    return chosen ^ rest


@outlined
def _some_want_all(inst, ctx, t, h, group):
    """Return whether a head of KV head h needs all that is there: then splits stay apart, though they may lack rows."""
    whole = False
    for head in range(h * group, (h + 1) * group):
        whole = whole or all_wanted(choice_at(inst, score_row(inst, ctx, t, head)))
    return whole


@outlined
def _ask(inst, ctx, tile, unit, group, coming, n, origin):
    """Return the V to request while n blocks are summed: one of the blocks that come next each; the others at once, and
    all their scores.
    """
    t, h, stretch = unit
    blocks, head, i = block_table(inst, ctx, t), head_parts(inst, ctx, h), 0
    while coming != 0:
        b = stretch * STRETCH_SPLITS * SPLIT_BLOCKS + trailing_zeros(coming)
        _keys, values, scales = sequence_block(inst, blocks, head, b)
        prefetch(scales)
        for row in range(h * group, (h + 1) * group):
            prefetch(score_row(inst, ctx, t, row) + 64 * b)
        if i < n:
            store_i64(tile + T_KEYS + 8 * i, values - origin)
        else:
            for line in range(0, parameter(inst, ATTENTION.block_bytes), 64):
                prefetch(values + line)
        coming &= coming - 1
        i += 1
    for rest in range(i, n):
        store_i64(tile + T_KEYS + 8 * rest, load_i64(tile + T_VALUES + 8 * rest))


@inline
def mean_at(inst, ctx, t, h, padded):
    """Address of the mean of V of a token and KV head, and after it of how many rows it is."""
    row = (t - first_scored(inst, ctx)) * parameter(inst, ATTENTION.kv_heads) + h
    return operand(inst, ctx, 7) + row * (4 * padded + 64)


@inline
def mean_blocks(position):
    """(blocks, step) of the mean for the token at a position: blocks `step` apart, from half a step on; or none."""
    below, step = max(position - MASK_TOKENS + 1, 0) >> 4, 1
    while below > MEAN_BLOCKS * step:
        step += step
    return div_i64(below + step - 1 - (step >> 1), step), step


@inline
def _in_mean(inst, tile, span, ahead, b):
    """V that is requested while a mean is formed."""
    _begin, end, _base, origin = span
    wanted = min(b + AHEAD, end - 1)
    return split_values(tile, origin, wanted), split_scales(tile, origin, wanted)


@inline
def _asked(inst, tile, span, ahead, b):
    """V of the unit that comes next, as `_ask` says it."""
    return split_keys(tile, span[3], b), split_scales(tile, span[3], b)


def _mean_step(kind, values):
    """Compute the mean of V that replaces the rows that a token omits."""
    softmax = softmax_step(kind)

    @outlined
    def mean(inst, ctx, tile, t, h, padded):
        blocks, head = block_table(inst, ctx, t), head_parts(inst, ctx, h)
        n, step = mean_blocks(position_of(ctx, t))
        pruned, out = layer_pruned(inst, ctx), mean_at(inst, ctx, t, h, padded)
        store_f32(out + 4 * padded, first_lane(splat_f32(0.0)))
        if n == 0:
            return
        for i in range(n):
            b, at = i * step + (step >> 1), tile + T_SCORES + 64 * i
            set_split_block(tile, head[0], i, sequence_block(inst, blocks, head, b))
            store_f32x16(at, splat_f32(0.0))
            if pruned != 0:
                mask_pruned(at, 1, pruned + BLOCK_TOKENS * load_i32(blocks + 4 * b))
        span = 0, n, 0, head[0]
        softmax(tile, 0, span)
        if load_f32(tile + T_M) <= LOWEST:
            return
        values(inst, tile, span, padded, 0, 0)
        atomic_add(ctx + CTX_VALUES, n)
        rows = sum_lanes(load_f32x16(tile + T_L))
        share = splat_f32(div_f32(first_lane(splat_f32(1.0)), rows))
        store_f32(out + 4 * padded, rows)
        for k in range(0, padded, 16):
            store_f32x16(out + 4 * k, load_f32x16(tile + acc_at(padded) + 4 * k) * share)

    return mean


def _steps(kind):
    """Make the steps of a tile of rows of one token in one stretch."""
    softmax, gather = softmax_step(kind), path_gather(kind.element)

    def of_tile(r, widths, mean):
        values = value_step(kind, r, widths, _asked)

        @outlined
        def step(inst, ctx, tile, unit, row, last, group, padded, part, ahead, coming):
            t, h, stretch = unit
            blocks, head = block_table(inst, ctx, t), head_parts(inst, ctx, h)
            first, rest, n = stretch * STRETCH_SPLITS * SPLIT_BLOCKS, part, 0
            while rest != 0:
                b = first + trailing_zeros(rest)
                rest &= rest - 1
                set_split_block(tile, head[0], n, sequence_block(inst, blocks, head, b))
                for i in range(r):
                    scores = score_row(inst, ctx, t, h * group + min(row + i, last))
                    store_f32x16(tile + T_SCORES + SCORES * i + 64 * n, load_f32x16(scores + 64 * b))
                n += 1
            if has_path(ctx, t):
                gather(inst, ctx, tile, t, first, part, blocks, head, padded)
            span = 0, n, 0, head[0]
            _ask(inst, ctx, tile, ahead, group, coming, n, head[0])
            for i in range(r):
                softmax(tile, i, span)
            values(inst, tile, span, padded, 0, 0)

        @inline
        def single(inst, ctx, tile, unit, slot, row, last, group, padded, fresh, ahead):
            t, h, stretch = unit
            found = _chosen(inst, ctx, tile, unit, group)
            coming = _chosen(inst, ctx, tile, ahead, group)
            if row == 0:
                if stretch == 0 and parameter(inst, ATTENTION.instead) == INSTEAD_MEAN:
                    mean(inst, ctx, tile, t, h, padded)
                if found != 0:
                    atomic_add(ctx + CTX_VALUES, count_ones(found))
            if found == 0:
                _ask(inst, ctx, tile, ahead, group, _first_blocks(coming), 0, 0)
            first, splits = stretch * STRETCH_SPLITS, parameter(inst, ATTENTION.splits)
            whole = _some_want_all(inst, ctx, t, h, group)
            index = ((t - first_scored(inst, ctx)) * parameter(inst, ATTENTION.heads) + h * group + row) * splits
            begin, end = _splits(inst, ctx, t, stretch)
            for split in range(begin, end):
                part = found & _SPLIT << SPLIT_BLOCKS * (split - first) if whole else _first_blocks(found)
                found ^= part
                if part != 0:
                    after = unit if found != 0 else ahead
                    wanted = _first_blocks(found if found != 0 else coming)
                    step(inst, ctx, tile, unit, row, last, group, padded, part, after, wanted)
                for i in range(min(r, last - row + 1)):
                    if part != 0:
                        leave_partial(inst, ctx, tile, i, index + i * splits + split, padded)
                    else:
                        at = operand(inst, ctx, 4) + (index + i * splits + split) * partial_bytes(padded)
                        store_f32(at, first_lane(splat_f32(LOWEST)))

        return single

    return of_tile


def _register(kv, tiles):
    kind = KINDS[kv]
    (large, *_), (small, *_), (one, widths, _chains) = tiles
    of_tile, mean = _steps(kind), _mean_step(kind, value_step(kind, one, widths, _in_mean))
    steps = [of_tile(r, widths, mean) for r, widths, _chains in tiles]
    by_token = few_tokens(large, small, *steps, runs=False, shift=STRETCH_SHIFT)

    @kernel(f"attention_values_{kv}")
    def attention_values(inst, ctx, tid, n_threads):
        group = div_i64(parameter(inst, ATTENTION.heads), parameter(inst, ATTENTION.kv_heads))
        tile = operand(inst, ctx, 3) + tid * parameter(inst, ATTENTION.scratch)
        store_i64(tile + T_UNIT, -1)
        padded, end = round_up_16(parameter(inst, ATTENTION.head_dim)), count(ctx, COUNT_TOKENS)
        by_token(inst, ctx, tile, group, padded, n_threads, first_scored(inst, ctx), end, claim(ctx), 0)
        return 0


for _kv in KINDS:
    _register(_kv, attention_tiles())
