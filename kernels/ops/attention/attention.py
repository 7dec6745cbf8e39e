"""Attention over KV blocks, split along the context as Flash-Decoding does (log-sum-exp merge: arXiv 2205.14135).

A context is cut into splits of SPLIT_BLOCKS blocks. Of each split come (m, l, acc): the largest score, the sum of
exponentials (16 lanes) and the weighted sum of V (attention_split.py); splits are merged in index order
(attention_rows.py). Whether splits run on different threads and are merged by the next instruction (few tokens, also
the last ones of a pass over many) or one after the other here, the operations on a row are the same in the same order,
so the result has the same bits. So has a row in a tile of any number of rows, and a token of a tree whose path was run
as a chain: splits and lanes go by its position in the path (attention_paths.py).

Operands: 0 qkv rows, 1 out rows, 2 the layer's blocks, 3 scratch, 4 partial results, 6 with FLAG_PRUNED which rows of
the blocks the layer lacks, 8 with FLAG_SINKS a logit for each query head that has no V (arXiv 2309.17453, gpt-oss), 9
with FLAG_ALIBI a slope for each query head (arXiv 2108.12409).
Parameters: parameters.ATTENTION. Reference: reference/attention/attention.py.
"""

from __future__ import annotations

from ...abi import COUNT_PROMPTED, FLAG_ALIBI, TOKEN_ROW
from ...parameters import ATTENTION
from ...registry import kernel
from ...vector.instruction import claim, count, flags, float_parameter, inline, operand, parameter, round_up_16, token
from ...vector.memory import load_f32, load_f32x16, load_i64, store_f32, store_f32x16, store_i64
from ...vector.scalars import div_i64
from ...vector.targets import attention_tiles
from .attention_kinds import KINDS
from .attention_paths import has_path, position_of
from .attention_rows import (
    SPLIT_SHIFT,
    T_L,
    T_M,
    T_TURNED,
    acc_at,
    bounds_at,
    finish,
    first_visible,
    merge,
    partial_bytes,
    positions_seen,
    queries_at,
    slopes_at,
    start_merge,
    value_dim,
)
from .attention_split import split_step
from .attention_units import few_tokens, first_split, together


@inline
def _query(t, row, last, h, group):
    """Token and query head of a row of KV head h, counted from the first head of token t.

    A tile may have more rows than are left: the rows after the last one repeat it, and write the same bits twice.
    """
    row = min(row, last)
    token_at = t + div_i64(row, group)
    return token_at, h * group + row - (token_at - t) * group


def start_step(kind, r):
    """Make ``start(inst, ctx, queries, t, row, last, h, group)``: the queries of a tile of r rows, and the
    rows they see."""
    prepare = kind.prepare(r)

    @inline
    def start(inst, ctx, queries, t, row, last, h, group):
        n = parameter(inst, ATTENTION.head_dim)
        for i in range(r):
            token_at, head = _query(t, row + i, last, h, group)
            position = position_of(ctx, token_at)
            q = operand(inst, ctx, 0) + token_at * parameter(inst, ATTENTION.q_stride) + 4 * n * head
            prepare(queries, i, q, n, float_parameter(inst, ATTENTION.scale))
            store_i64(bounds_at(queries, r, i), first_visible(inst, position))
            store_i64(bounds_at(queries, r, i) + 8, position)
            if flags(inst) & FLAG_ALIBI:
                store_f32(slopes_at(queries, r) + 4 * i, load_f32(operand(inst, ctx, 9) + 4 * head))

    return start


def single_step(r, start, step, leave):
    """Make the computation of a tile of r rows over one split.

    ``leave(inst, ctx, tile, i, bounds, token, head, split, padded)`` stores the result of `step` for row i where others
    find it, if the row sees any of the split.
    """

    @inline
    def single(inst, ctx, tile, unit, slot, row, last, group, padded, fresh, ahead):
        """One split of some rows; `fresh` says that the queries are not in their slot yet."""
        t, h, split = unit
        queries = tile + queries_at(inst, padded, slot)
        if fresh:
            start(inst, ctx, queries, t, row, last, h, group)
        seen = positions_seen(queries, r)
        if seen[0] >> SPLIT_SHIFT <= split and split <= seen[1] >> SPLIT_SHIFT:
            step(inst, ctx, tile, queries, unit, seen, padded, ahead)
            for i in range(min(r, last - row + 1)):
                token_at, head = _query(t, row + i, last, h, group)
                bounds = bounds_at(queries, r, i)
                if load_i64(bounds) >> SPLIT_SHIFT <= split and split <= load_i64(bounds + 8) >> SPLIT_SHIFT:
                    leave(inst, ctx, tile, i, bounds, token_at, head, split, padded)

    return single


@inline
def leave_partial(inst, ctx, tile, i, index, padded):
    """Put (m, l, acc) of row i of a split where the merge finds it, in the partial result `index`."""
    partial = operand(inst, ctx, 4) + index * partial_bytes(padded)
    store_f32(partial, load_f32(tile + T_M + 4 * i))
    store_f32x16(partial + 64, load_f32x16(tile + T_L + 64 * i))
    for k in range(0, padded, 16):
        store_f32x16(partial + 128 + 4 * k, load_f32x16(tile + acc_at(padded) + 4 * (i * padded + k)))


@inline
def _leave(inst, ctx, tile, i, bounds, t, head, split, padded):
    row = (t - first_split(ctx)) * parameter(inst, ATTENTION.heads) + head
    index = row * parameter(inst, ATTENTION.splits) + split
    leave_partial(inst, ctx, tile, i, index, padded)


def _tile_step(kind, r, widths, chains):
    """Return the function for a tile of r rows: all splits merged here, or one split left in the partial results."""
    step, start = split_step(kind, r, widths, chains), start_step(kind, r)

    @inline
    def whole(inst, ctx, tile, t, row, last, h, group, padded):
        """All splits that the rows see, merged as they come."""
        queries = tile + queries_at(inst, padded, 0)
        start(inst, ctx, queries, t, row, last, h, group)
        for i in range(r):
            _token_at, head = _query(t, row + i, last, h, group)
            start_merge(inst, ctx, tile, i, padded, head)
        seen = positions_seen(queries, r)
        for s in range(seen[0] >> SPLIT_SHIFT, (seen[1] >> SPLIT_SHIFT) + 1):
            ahead = (t, h, min(s + 1, token(ctx, t, TOKEN_ROW) >> SPLIT_SHIFT))
            step(inst, ctx, tile, queries, (t, h, s), seen, padded, ahead)
            for i in range(r):
                sums = tile + acc_at(padded) + 4 * i * padded
                merge(tile, i, padded, tile + T_M + 4 * i, tile + T_L + 64 * i, sums)
        n = value_dim(inst)
        for i in range(r):
            token_at, head = _query(t, row + i, last, h, group)
            out = operand(inst, ctx, 1) + token_at * parameter(inst, ATTENTION.out_stride) + 4 * n * head
            finish(tile, i, padded, out, n)

    return whole, single_step(r, start, step, _leave)


@inline
def _run_end(ctx, t, first, tokens, step):
    """The end of the run of one sequence that begins with token t; t itself if none begins there.

    Runs are of `step` tokens at most, counted from the first token.
    """
    within = t - first - div_i64(t - first, step) * step
    if within > 0 and not has_path(ctx, t) and together(ctx, t - 1, t):
        return t
    end, most = t + 1, min(t + step - within, tokens)
    while end < most and not has_path(ctx, t) and together(ctx, t, end):
        end += 1
    return end


def _prompt(large, small, many, some, one):
    """Attention of tiles of tokens, each with all splits."""

    @inline
    def attend(inst, ctx, tile, t, end, h, group, padded):
        """Tokens t .. end, which may share tiles, of KV head h."""
        rows, row = (end - t) * group, 0
        while row < rows:
            if rows - row > small:
                many(inst, ctx, tile, t, row, rows - 1, h, group, padded)
                row += large
            elif rows - row > 1:
                some(inst, ctx, tile, t, row, rows - 1, h, group, padded)
                row += small
            else:
                one(inst, ctx, tile, t, row, rows - 1, h, group, padded)
                row += 1

    @inline
    def prompt(inst, ctx, tile, group, padded, tokens):
        """The first tokens; returns the claimed unit that is none of theirs, and how many theirs are.

        A unit is a tile of tokens of prompts, of any sequences, or one decoded token with the following ones of its
        sequence: decoded tokens of different sequences read different contexts.
        """
        kv_heads, step = parameter(inst, ATTENTION.kv_heads), parameter(inst, ATTENTION.tokens)
        prompted = min(count(ctx, COUNT_PROMPTED), tokens)
        tiles = div_i64(prompted + step - 1, step)
        unit, units = claim(ctx), (tiles + tokens - prompted) * kv_heads
        while unit < units:
            token_tile = div_i64(unit, kv_heads)
            t, end = token_tile * step, min(token_tile * step + step, prompted)
            if token_tile >= tiles:
                t = prompted + token_tile - tiles
                end = _run_end(ctx, t, prompted, tokens, step)
            while t < end:
                stop = t + 1
                while stop < end and not has_path(ctx, t) and together(ctx, t, stop):
                    stop += 1
                attend(inst, ctx, tile, t, stop, unit - token_tile * kv_heads, group, padded)
                t = stop
            unit = claim(ctx)
        return unit, units

    return prompt


def _register(kv, tiles):
    """Kernel of a KV type; rows go through in tiles of three heights."""
    (large, *_), (small, *_), _one = tiles
    steps = [_tile_step(KINDS[kv], *tile) for tile in tiles]
    prompt = _prompt(large, small, *(whole for whole, _single in steps))
    decode = few_tokens(large, small, *(single for _whole, single in steps))

    @kernel(f"attention_{kv}")
    def attention(inst, ctx, tid, n_threads):
        group = div_i64(parameter(inst, ATTENTION.heads), parameter(inst, ATTENTION.kv_heads))
        padded = round_up_16(value_dim(inst))
        tile = operand(inst, ctx, 3) + tid * parameter(inst, ATTENTION.scratch)
        store_i64(tile + T_TURNED, 0)
        tokens = count(ctx, parameter(inst, ATTENTION.rows))
        whole = min(first_split(ctx), tokens)
        unit, units = prompt(inst, ctx, tile, group, padded, whole)
        if whole < tokens:
            decode(inst, ctx, tile, group, padded, n_threads, whole, tokens, unit, units)
        return 0


for _kv in KINDS:
    _register(_kv, attention_tiles())
