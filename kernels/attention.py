"""Attention over KV blocks, split along the context as Flash-Decoding does (log-sum-exp merge: arXiv 2205.14135).

A context is cut into splits of SPLIT_BLOCKS blocks. Of each split come (m, l, acc): the largest score, the sum of
exponentials (16 lanes) and the weighted sum of V; splits are merged in index order. Whether splits run on different
threads and are merged by the next record (few tokens, long context) or one after the other here, the operations on a
row are the same in the same order, so the result has the same bits.

Rows are (token, query head) pairs that share a KV head. They go through in tiles: each K line and V row that is loaded
serves all rows of a tile, whose queries are interleaved so that they lie at constant distances.

Places: 0 qkv rows, 1 out rows, 2 the layer's blocks, 3 scratch, 4 partial results. Parameters: parameters.ATTENTION.
Twin: reference/attention.py.
"""

from __future__ import annotations

from .abi import (
    ATTENTION_TILE,
    BLOCK_TOKENS,
    COUNT_MERGE,
    COUNT_TOKENS,
    CTX_SEQUENCES,
    SEQUENCE_BLOCKS,
    SEQUENCE_BYTES,
    SPLIT_BLOCKS,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
)
from .blocks import store_tile, zero_tile
from .common import claim, count, float_parameter, inline, outlined, parameter, place, round_up_16, token
from .dots import dot_s8, scale_add, start_s8
from .parameters import ATTENTION
from .registry import kernel
from .simd import (
    div_f32,
    div_i64,
    first_lane,
    keep_first,
    lane_numbers,
    load_f32,
    load_f32x16,
    load_i8x16,
    load_i32,
    load_i64,
    load_line,
    mask_outside,
    max_f32,
    max_lanes,
    prefetch,
    round_to_i32,
    scatter_f32,
    scatter_i8x4,
    splat_f32,
    splat_i32,
    store_f32,
    store_f32x16,
    store_first,
    store_i32,
    store_i64,
    sum_lanes,
    sum_lanes_i32,
    vabs,
    vmax,
)
from .targets import attention_heights, fma, fma_rows_f16, fma_rows_f32, fma_rows_i8, fma_splat, load_f16x16
from .vecmath import exp

LOWEST = -1e30
"""Score of what is masked: finite, so that a row whose split is all masked stays a number, later weighted by 0."""
PREFETCH_BLOCKS = 4
"""Blocks between the one in work and the one that is prefetched: blocks lie anywhere, so the hardware cannot guess."""
SPLIT_TOKENS = SPLIT_BLOCKS * BLOCK_TOKENS
SPLIT_SHIFT = SPLIT_TOKENS.bit_length() - 1

# Scratch of a tile of up to ATTENTION_TILE (8) rows: arrays by row, then queries, scores, acc, merged acc.
T_SCALE, T_OFFSET, T_M, T_MERGED_M, T_LOW, T_HIGH = 0, 64, 128, 192, 256, 320
T_L, T_MERGED_L = 384, 384 + 64 * ATTENTION_TILE
T_Q = 384 + 128 * ATTENTION_TILE
SCORES = 4 * SPLIT_TOKENS
"""Bytes of a row's scores of one split."""


@inline
def scores_at(padded):
    """Offset of the scores: rows of SPLIT_TOKENS floats."""
    return T_Q + 4 * ATTENTION_TILE * padded


@inline
def acc_at(padded):
    """Offset of the sums over V of this split, a row after the other."""
    return scores_at(padded) + SCORES * ATTENTION_TILE


@inline
def merged_at(padded):
    """Offset of the merged sums."""
    return acc_at(padded) + 4 * ATTENTION_TILE * padded


@inline
def partial_bytes(padded):
    """One split's result of one row: m (64 bytes for alignment), l, acc."""
    return 128 + 4 * padded


# -- queries: interleaved by 4 bytes, row i of a tile of r at distance 4 i ---------------------------------------------


@outlined
def prepare_int8(tile, i, r, q, n, scale):
    """Quantise a query with one scale (softmax's folded in); its offset (-8 x sum) undoes that of unsigned products."""
    largest = splat_f32(0.0)
    for k in range(0, n, 16):
        largest = vmax(largest, vabs(keep_first(load_f32x16(q + 4 * k), n - k)))
    top = max_lanes(largest)
    inverse = splat_f32(div_f32(first_lane(splat_f32(127.0)), max_f32(top, first_lane(splat_f32(1e-30)))))
    total = splat_i32(0)
    for k in range(0, n, 16):
        values = round_to_i32(keep_first(load_f32x16(q + 4 * k), n - k) * inverse)
        scatter_i8x4(tile + T_Q + k * r + 4 * i, values, 4 * r)
        total = total + values
    store_f32(tile + T_SCALE + 4 * i, first_lane(splat_f32(top) * splat_f32(1.0 / 127.0) * splat_f32(scale)))
    store_i32(tile + T_OFFSET + 4 * i, -8 * sum_lanes_i32(total))


@outlined
def prepare_float(tile, i, r, q, n, scale):
    """Scale a query."""
    for k in range(0, n, 16):
        values = keep_first(load_f32x16(q + 4 * k) * splat_f32(scale), n - k)
        scatter_f32(tile + T_Q + 4 * k * r + 4 * i, values, 4 * r)


# -- scores of one block for a tile of r rows --------------------------------------------------------------------------


def _scores_int8(r):
    @inline
    def scores(tile, block, ahead, padded):
        ints = start_s8(1, r, tile + T_OFFSET)
        for line in range(padded >> 2):
            ints = dot_s8(ints, load_line(block + 64 * line), tile + T_Q + 4 * r * line)
            prefetch(ahead + 128 * line)
            prefetch(ahead + 128 * line + 64)
        k_scales = load_f16x16(block + 2 * BLOCK_TOKENS * padded)
        return scale_add(zero_tile(r), ints, k_scales, tile + T_SCALE)

    return scores


def _scores_float(r, load, element):
    @inline
    def scores(tile, block, ahead, padded):
        acc = zero_tile(r)
        for d in range(padded):
            acc = fma_splat(acc, load(block + 16 * element * d), tile + T_Q + 4 * r * d, 4)
            prefetch(ahead + 32 * element * d)
        return acc

    return scores


@inline
def v_scales_int8(block, padded):
    """Scales of the 16 V rows."""
    return load_f16x16(block + 2 * BLOCK_TOKENS * padded + 2 * BLOCK_TOKENS)


@inline
def v_scales_float(block, padded):
    """Float rows have none."""
    return splat_f32(1.0)


# -- rows: merge, finish -----------------------------------------------------------------------------------------------


@outlined
def clear_merged(tile, i, padded):
    """Start the merge of splits of row i."""
    store_f32(tile + T_MERGED_M + 4 * i, first_lane(splat_f32(LOWEST)))
    store_f32x16(tile + T_MERGED_L + 64 * i, splat_f32(0.0))
    for k in range(0, padded, 16):
        store_f32x16(tile + merged_at(padded) + 4 * (i * padded + k), splat_f32(0.0))


@outlined
def merge(tile, i, padded, m_at, l_at, sums):
    """Add one split's (m, l, acc) to the merged ones of row i (log-sum-exp)."""
    m, merged = load_f32(m_at), load_f32(tile + T_MERGED_M + 4 * i)
    new = max_f32(m, merged)
    old_share, share = exp(splat_f32(merged) - splat_f32(new)), exp(splat_f32(m) - splat_f32(new))
    store_f32(tile + T_MERGED_M + 4 * i, new)
    total = tile + T_MERGED_L + 64 * i
    store_f32x16(total, fma(load_f32x16(total), old_share, load_f32x16(l_at) * share))
    acc = tile + merged_at(padded) + 4 * i * padded
    for k in range(0, padded, 16):
        store_f32x16(acc + 4 * k, fma(load_f32x16(acc + 4 * k), old_share, load_f32x16(sums + 4 * k) * share))


@outlined
def finish(tile, i, padded, out, n):
    """out = merged acc / merged l of row i."""
    inverse = splat_f32(div_f32(first_lane(splat_f32(1.0)), sum_lanes(load_f32x16(tile + T_MERGED_L + 64 * i))))
    acc = tile + merged_at(padded) + 4 * i * padded
    for k in range(0, n, 16):
        store_first(out + 4 * k, load_f32x16(acc + 4 * k) * inverse, min(16, n - k))


@inline
def first_visible(rec, position):
    """First position that a query at `position` sees."""
    window = parameter(rec, ATTENTION.window)
    return max(0, position - window + 1) if window else 0


# -- one split for a tile of r rows ------------------------------------------------------------------------------------


@inline
def block_address(rec, blocks, kv_head, b):
    """Address of block b of a sequence for one KV head."""
    return kv_head + load_i32(blocks + 4 * b) * parameter(rec, ATTENTION.block_bytes)


def _split_step(r, make_scores, v_scales, load, fma_rows, element):
    scores = make_scores(r)

    @outlined
    def mask_row(tile, i, at, first):
        """Scores of one block of row i: what the row does not see becomes LOWEST."""
        low = max(load_i64(tile + T_LOW + 8 * i) - first, 0)
        high = min(load_i64(tile + T_HIGH + 8 * i) - first, BLOCK_TOKENS - 1)
        if low > 0 or high < BLOCK_TOKENS - 1:
            s = mask_outside(load_f32x16(at), lane_numbers(), low, high, first_lane(splat_f32(LOWEST)))
            store_f32x16(at, s)

    @inline
    def score(rec, tile, blocks, kv_head, begin, end, base, padded):
        """Pass 1: scores of blocks begin .. end, block b of the split at 64 (b - base)."""
        for b in range(begin, end):
            ahead = block_address(rec, blocks, kv_head, min(b + PREFETCH_BLOCKS, end - 1))
            at = tile + scores_at(padded) + 64 * (b - base)
            store_tile(scores(tile, block_address(rec, blocks, kv_head, b), ahead, padded), at, SCORES)
            for i in range(r):
                mask_row(tile, i, at + SCORES * i, b * BLOCK_TOKENS)

    @outlined
    def softmax(rec, tile, i, blocks, kv_head, begin, end, base, padded):
        """Pass 2: scores of row i to weights (times the V scales), their largest and their sum."""
        row = tile + scores_at(padded) + SCORES * i
        top = load_f32x16(row + 64 * (begin - base))
        for b in range(begin + 1, end):
            top = vmax(top, load_f32x16(row + 64 * (b - base)))
        m = max_lanes(top)
        total = splat_f32(0.0)
        for b in range(begin, end):
            p = exp(load_f32x16(row + 64 * (b - base)) - splat_f32(m))
            total = total + p
            scaled = p * v_scales(block_address(rec, blocks, kv_head, b), padded)
            store_f32x16(row + 64 * (b - base), scaled)
        store_f32(tile + T_M + 4 * i, m)
        store_f32x16(tile + T_L + 64 * i, total)

    @inline
    def values(rec, tile, blocks, kv_head, begin, end, base, padded):
        """Pass 3: sums of V rows by weight; for a tile of rows vector by vector, in token order."""
        weights, acc_base = tile + scores_at(padded), tile + acc_at(padded)
        for k in range(0, padded, 16):
            acc = zero_tile(r)
            for b in range(begin, end):
                v = block_address(rec, blocks, kv_head, b) + (BLOCK_TOKENS * padded + k) * element
                p = weights + 64 * (b - base)
                for j in range(BLOCK_TOKENS):
                    acc = fma_splat(acc, load(v + j * padded * element), p + 4 * j, SCORES)
            store_tile(acc, acc_base + 4 * k, 4 * padded)

    @inline
    def values_wide(n, rec, tile, blocks, kv_head, begin, end, base, padded, k):
        """Pass 3 for one row: n vectors of the row at once, each in token order."""
        acc = zero_tile(n)
        for b in range(begin, end):
            v = block_address(rec, blocks, kv_head, b) + (BLOCK_TOKENS * padded + k) * element
            p = tile + scores_at(padded) + 64 * (b - base)
            for j in range(BLOCK_TOKENS):
                acc = fma_rows(acc, v + j * padded * element, p + 4 * j)
        store_tile(acc, tile + acc_at(padded) + 4 * k, 64)

    @inline
    def values_one(rec, tile, blocks, kv_head, begin, end, base, padded):
        """Pass 3 for a tile of one row."""
        k = 0
        while k + 64 <= padded:
            values_wide(4, rec, tile, blocks, kv_head, begin, end, base, padded, k)
            k += 64
        while k < padded:
            values_wide(1, rec, tile, blocks, kv_head, begin, end, base, padded, k)
            k += 16

    add_values = values_one if r == 1 else values

    @inline
    def step(rec, ctx, tile, t, h, padded, split, low, high):
        """(m, l, acc) of the blocks of one split that any row of the tile sees."""
        sequence = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * token(ctx, t, TOKEN_SEQUENCE)
        blocks = load_i64(sequence + SEQUENCE_BLOCKS)
        kv_head = place(rec, ctx, 2) + h * parameter(rec, ATTENTION.head_bytes)
        base = split * SPLIT_BLOCKS
        begin, end = max(base, low >> 4), min(base + SPLIT_BLOCKS, (high >> 4) + 1)
        score(rec, tile, blocks, kv_head, begin, end, base, padded)
        for i in range(r):
            softmax(rec, tile, i, blocks, kv_head, begin, end, base, padded)
        add_values(rec, tile, blocks, kv_head, begin, end, base, padded)

    return step


# -- kernels -----------------------------------------------------------------------------------------------------------


def _tile_step(r, prepare, *kind):
    """What a tile of r rows goes through: all splits merged here, or one split left in the partial results."""
    step = _split_step(r, *kind)

    @inline
    def run(rec, ctx, tile, t, row, h, group, padded, split):
        """Rows row .. row + r of KV head h, counted from the first head of token t; split < 0: all splits."""
        n, heads = parameter(rec, ATTENTION.head_dim), parameter(rec, ATTENTION.heads)
        for i in range(r):
            token_at = t + div_i64(row + i, group)
            position = token(ctx, token_at, TOKEN_POSITION)
            head = h * group + row + i - (token_at - t) * group
            q = place(rec, ctx, 0) + token_at * parameter(rec, ATTENTION.q_stride) + 4 * n * head
            prepare(tile, i, r, q, n, float_parameter(rec, ATTENTION.scale))
            store_i64(tile + T_LOW + 8 * i, first_visible(rec, position))
            store_i64(tile + T_HIGH + 8 * i, position)
            clear_merged(tile, i, padded)
        low, high = load_i64(tile + T_LOW), load_i64(tile + T_HIGH + 8 * (r - 1))
        begin, end = low >> SPLIT_SHIFT, (high >> SPLIT_SHIFT) + 1
        if split >= 0:
            begin, end = max(begin, split), min(end, split + 1)
        for s in range(begin, end):
            step(rec, ctx, tile, t, h, padded, s, low, high)
            for i in range(r):
                sums = tile + acc_at(padded) + 4 * i * padded
                if split < 0:
                    merge(tile, i, padded, tile + T_M + 4 * i, tile + T_L + 64 * i, sums)
                else:
                    index = (t * heads + h * group + row + i) * parameter(rec, ATTENTION.splits) + s
                    partial = place(rec, ctx, 4) + index * partial_bytes(padded)
                    store_f32(partial, load_f32(tile + T_M + 4 * i))
                    store_f32x16(partial + 64, load_f32x16(tile + T_L + 64 * i))
                    for k in range(0, padded, 16):
                        store_f32x16(partial + 128 + 4 * k, load_f32x16(sums + 4 * k))
        if split < 0:
            for i in range(r):
                token_at = t + div_i64(row + i, group)
                head = h * group + row + i - (token_at - t) * group
                out = place(rec, ctx, 1) + token_at * parameter(rec, ATTENTION.out_stride) + 4 * n * head
                finish(tile, i, padded, out, n)

    return run


def _register(kv, heights, prepare, *kind):
    """Kernel of a KV type; rows go through in tiles of the three heights."""
    large, small = heights
    many, some, one = (_tile_step(r, prepare, *kind) for r in (large, small, 1))

    @inline
    def attend(rec, ctx, tile, t, end, h, group, padded, split):
        """Tokens t .. end (of one sequence) of KV head h."""
        rows, row = (end - t) * group, 0
        while row + large <= rows:
            many(rec, ctx, tile, t, row, h, group, padded, split)
            row += large
        while row + small <= rows:
            some(rec, ctx, tile, t, row, h, group, padded, split)
            row += small
        while row < rows:
            one(rec, ctx, tile, t, row, h, group, padded, split)
            row += 1

    @kernel(f"attention_{kv}")
    def attention(rec, ctx, tid, n_threads):
        heads, kv_heads = parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.kv_heads)
        group, padded = div_i64(heads, kv_heads), round_up_16(parameter(rec, ATTENTION.head_dim))
        tile, split_tokens = place(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch), count(ctx, COUNT_MERGE)
        tokens, step, splits = count(ctx, COUNT_TOKENS), parameter(rec, ATTENTION.tokens), 1
        if split_tokens > 0:
            tokens, step, splits = split_tokens, 1, parameter(rec, ATTENTION.splits)
        units = div_i64(tokens + step - 1, step) * kv_heads * splits
        unit = claim(ctx)
        while unit < units:
            token_tile = div_i64(unit, kv_heads * splits)
            h = div_i64(unit - token_tile * kv_heads * splits, splits)
            split = unit - (token_tile * kv_heads + h) * splits if split_tokens > 0 else -1
            t, end = token_tile * step, min(token_tile * step + step, tokens)
            while t < end:  # tokens of one sequence at a time
                stop = t + 1
                while stop < end and token(ctx, stop, TOKEN_SEQUENCE) == token(ctx, t, TOKEN_SEQUENCE):
                    stop += 1
                attend(rec, ctx, tile, t, stop, h, group, padded, split)
                t = stop
            unit = claim(ctx)
        return 0


_register("int8", attention_heights(), prepare_int8, _scores_int8, v_scales_int8, load_i8x16, fma_rows_i8, 1)
_register("f16", (4, 2), prepare_float, lambda r: _scores_float(r, load_f16x16, 2), v_scales_float, load_f16x16,
          fma_rows_f16, 2)
_register("f32", (4, 2), prepare_float, lambda r: _scores_float(r, load_f32x16, 4), v_scales_float, load_f32x16,
          fma_rows_f32, 4)


@kernel("attention_merge")
def attention_merge(rec, ctx, tid, n_threads):
    """Merge the splits of each (token, head) in index order."""
    heads, n = parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.head_dim)
    padded, splits = round_up_16(n), parameter(rec, ATTENTION.splits)
    tile = place(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch)
    unit = claim(ctx)
    while unit < count(ctx, COUNT_MERGE) * heads:
        t = div_i64(unit, heads)
        head = unit - t * heads
        position = token(ctx, t, TOKEN_POSITION)
        clear_merged(tile, 0, padded)
        for split in range(first_visible(rec, position) >> SPLIT_SHIFT, (position >> SPLIT_SHIFT) + 1):
            partial = place(rec, ctx, 4) + (unit * splits + split) * partial_bytes(padded)
            merge(tile, 0, padded, partial, partial + 64, partial + 128)
        finish(tile, 0, padded, place(rec, ctx, 1) + t * parameter(rec, ATTENTION.out_stride) + 4 * n * head, n)
        unit = claim(ctx)
    return 0
