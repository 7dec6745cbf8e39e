"""Attention over KV blocks with an online softmax (FlashAttention, arXiv 2205.14135; split as Flash-Decoding).

A context is cut into splits of SPLIT_BLOCKS blocks. A split is reduced block by block to (m, l, acc): largest score, sum of
exponentials (16 lanes), weighted sum of V; splits are merged in index order. Whether splits run on different threads and
are merged by the next record (few tokens, long context) or one after the other here, the operations on a row are the
same in the same order, so the result has the same bits.

Rows are (token, query head) pairs that share a KV head: each K line and V row is loaded once for a tile of them.

Places: 0 qkv rows, 1 out rows, 2 the layer's blocks, 3 scratch, 4 partial results. Twin: reference/attention.py.
"""

from __future__ import annotations

from .abi import (
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
from .common import claim, count, float_parameter, inline, parameter, place, round_up_16, token
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
    load_tile,
    mask_outside,
    max_f32,
    max_lanes,
    round_to_i32,
    splat_f32,
    splat_i32,
    store_f32,
    store_f32x16,
    store_first,
    store_i8x16,
    store_i32,
    store_i64,
    store_tile,
    sum_lanes,
    sum_lanes_i32,
    vabs,
    vmax,
    zero_tile,
)
from .targets import dot_s8, fma, fma_splat, load_f16x16, scale_add, start_s8
from .vecmath import exp

LOWEST = -1e30
"""Score of what is masked: finite, so that a row whose block is all masked stays a number and is weighted by exactly 0 later."""

# A row in scratch: state, then q (as many bytes as floats need), acc and merged acc.
S_Q_SCALE, S_Q_SUM, S_M, S_MERGED_M, S_LOW, S_HIGH = 0, 4, 8, 12, 16, 24
S_L, S_MERGED_L, S_P, S_Q = 64, 128, 192, 256


@inline
def row_bytes(padded):
    """Scratch of one row: state, q, acc, merged acc."""
    return S_Q + 12 * padded


@inline
def partial_bytes(padded):
    """One split's result of one row: m (64 bytes for alignment), l, acc."""
    return 128 + 4 * padded


# -- queries -----------------------------------------------------------------------------------------------------------


@inline
def prepare_int8(row, q, n, scale):
    """Quantise a query with one scale (the softmax scale folded in); its sum undoes the offset of unsigned products."""
    largest = splat_f32(0.0)
    for i in range(0, n, 16):
        largest = vmax(largest, vabs(keep_first(load_f32x16(q + 4 * i), n - i)))
    top = max_lanes(largest)
    inverse = splat_f32(div_f32(first_lane(splat_f32(127.0)), max_f32(top, first_lane(splat_f32(1e-30)))))
    total = splat_i32(0)
    for i in range(0, n, 16):
        values = round_to_i32(keep_first(load_f32x16(q + 4 * i), n - i) * inverse)
        store_i8x16(row + S_Q + i, values)
        total = total + values
    store_f32(row + S_Q_SCALE, first_lane(splat_f32(top) * splat_f32(1.0 / 127.0) * splat_f32(scale)))
    store_i32(row + S_Q_SUM, sum_lanes_i32(total))


@inline
def prepare_float(row, q, n, scale):
    """Scale a query."""
    for i in range(0, n, 16):
        store_f32x16(row + S_Q + 4 * i, keep_first(load_f32x16(q + 4 * i) * splat_f32(scale), n - i))


# -- one block, a tile of r rows ---------------------------------------------------------------------------------------


def _scores_int8(r):
    @inline
    def scores(row, stride, block, padded):
        ints = start_s8(r, row + S_Q_SUM, stride)
        for line in range(padded >> 2):
            ints = dot_s8(ints, load_line(block + 64 * line), row + S_Q + 4 * line, stride)
        k_scales = load_f16x16(block + 2 * BLOCK_TOKENS * padded)
        return scale_add(zero_tile(r), ints, k_scales, row + S_Q_SCALE, stride)

    return scores


def _scores_float(r, load, element):
    @inline
    def scores(row, stride, block, padded):
        acc = zero_tile(r)
        for d in range(padded):
            acc = fma_splat(acc, load(block + 16 * element * d), row + S_Q + 4 * d, stride)
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


@inline
def absorb(row, padded, first, v_scales):
    """Softmax step of one row: scores (in S_P) to weights; the sums so far are rescaled where a larger score came."""
    s = load_f32x16(row + S_P)
    low, high = load_i64(row + S_LOW) - first, load_i64(row + S_HIGH) - first
    s = mask_outside(s, lane_numbers(), max(low, 0), min(high, 15), first_lane(splat_f32(LOWEST)))
    m = load_f32(row + S_M)
    new = max_f32(m, max_lanes(s))
    p = exp(s - splat_f32(new))
    total = load_f32x16(row + S_L)
    if new != m:
        shrink = exp(splat_f32(m) - splat_f32(new))
        total = total * shrink
        acc = row + S_Q + 4 * padded
        for i in range(0, padded, 16):
            store_f32x16(acc + 4 * i, load_f32x16(acc + 4 * i) * shrink)
        store_f32(row + S_M, new)
    store_f32x16(row + S_L, total + p)
    store_f32x16(row + S_P, p * v_scales)


def _block_step(make_scores, v_scales, load, element, r):
    scores = make_scores(r)

    @inline
    def step(row, stride, block, padded, first):
        store_tile(scores(row, stride, block, padded), row + S_P, stride)
        scales = v_scales(block, padded)
        for i in range(r):
            absorb(row + i * stride, padded, first, scales)
        acc_at = row + S_Q + 4 * padded
        v = block + BLOCK_TOKENS * padded * element
        for i in range(0, padded, 16):
            acc = load_tile(zero_tile(r), acc_at + 4 * i, stride)
            for j in range(BLOCK_TOKENS):
                acc = fma_splat(acc, load(v + (j * padded + i) * element), row + S_P + 4 * j, stride)
            store_tile(acc, acc_at + 4 * i, stride)

    return step


# -- rows: clear, merge, finish ----------------------------------------------------------------------------------------


@inline
def clear(row, padded, merged):
    """Start a split (merged = 0) or the merge of splits (1)."""
    store_f32(row + (S_MERGED_M if merged else S_M), first_lane(splat_f32(LOWEST)))
    store_f32x16(row + (S_MERGED_L if merged else S_L), splat_f32(0.0))
    acc = row + S_Q + (8 if merged else 4) * padded
    for i in range(0, padded, 16):
        store_f32x16(acc + 4 * i, splat_f32(0.0))


@inline
def merge(row, padded, m_at, l_at, acc_at):
    """Add one split's (m, l, acc) to the merged ones (log-sum-exp)."""
    m, merged = load_f32(m_at), load_f32(row + S_MERGED_M)
    new = max_f32(m, merged)
    old_share, share = exp(splat_f32(merged) - splat_f32(new)), exp(splat_f32(m) - splat_f32(new))
    store_f32(row + S_MERGED_M, new)
    store_f32x16(row + S_MERGED_L, fma(load_f32x16(row + S_MERGED_L), old_share, load_f32x16(l_at) * share))
    acc = row + S_Q + 8 * padded
    for i in range(0, padded, 16):
        store_f32x16(acc + 4 * i, fma(load_f32x16(acc + 4 * i), old_share, load_f32x16(acc_at + 4 * i) * share))


@inline
def finish(row, padded, out, n):
    """out = merged acc / merged l."""
    inverse = splat_f32(div_f32(first_lane(splat_f32(1.0)), sum_lanes(load_f32x16(row + S_MERGED_L))))
    acc = row + S_Q + 8 * padded
    for i in range(0, n, 16):
        store_first(out + 4 * i, load_f32x16(acc + 4 * i) * inverse, min(16, n - i))


# -- kernels -----------------------------------------------------------------------------------------------------------


@inline
def first_visible(rec, position):
    """First position that a query at `position` sees."""
    window = parameter(rec, ATTENTION.window)
    return max(0, position - window + 1) if window else 0


def _register(kv, make_scores, prepare, v_scales, load, element):
    four, one = (_block_step(make_scores, v_scales, load, element, r) for r in (4, 1))

    @inline
    def prepare_rows(rec, ctx, scratch, t, end, h, group, padded):
        """Queries of tokens t .. end of KV head h, with what each may see."""
        n, row = parameter(rec, ATTENTION.head_dim), scratch
        while t < end:
            position = token(ctx, t, TOKEN_POSITION)
            q = place(rec, ctx, 0) + t * parameter(rec, ATTENTION.q_stride) + 4 * n * h * group
            for g in range(group):
                prepare(row, q + 4 * n * g, n, float_parameter(rec, ATTENTION.scale))
                store_i64(row + S_LOW, first_visible(rec, position))
                store_i64(row + S_HIGH, position)
                clear(row, padded, 1)
                row += row_bytes(padded)
            t += 1

    @inline
    def run_split(rec, ctx, scratch, rows, t, h, padded, split, low, high):
        """Reduce the blocks of one split that any of the rows may see."""
        stride = row_bytes(padded)
        for i in range(rows):
            clear(scratch + i * stride, padded, 0)
        sequence = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * token(ctx, t, TOKEN_SEQUENCE)
        blocks = load_i64(sequence + SEQUENCE_BLOCKS)
        kv_head = place(rec, ctx, 2) + h * parameter(rec, ATTENTION.head_bytes)
        for b in range(max(split * SPLIT_BLOCKS, low >> 4), min((split + 1) * SPLIT_BLOCKS, (high >> 4) + 1)):
            block = kv_head + load_i32(blocks + 4 * b) * parameter(rec, ATTENTION.block_bytes)
            i = 0
            while i + 4 <= rows:
                four(scratch + i * stride, stride, block, padded, b * BLOCK_TOKENS)
                i += 4
            while i < rows:
                one(scratch + i * stride, stride, block, padded, b * BLOCK_TOKENS)
                i += 1

    @inline
    def attend(rec, ctx, scratch, t, end, h, group, padded):
        """All splits of tokens t .. end (of one sequence), merged here."""
        rows, stride, n = (end - t) * group, row_bytes(padded), parameter(rec, ATTENTION.head_dim)
        prepare_rows(rec, ctx, scratch, t, end, h, group, padded)
        low, high = load_i64(scratch + S_LOW), load_i64(scratch + (rows - 1) * stride + S_HIGH)
        for split in range(low >> 8, (high >> 8) + 1):
            run_split(rec, ctx, scratch, rows, t, h, padded, split, low, high)
            for i in range(rows):
                row = scratch + i * stride
                merge(row, padded, row + S_M, row + S_L, row + S_Q + 4 * padded)
        for i in range(rows):
            token_at = t + div_i64(i, group)
            head = h * group + i - (token_at - t) * group
            out = place(rec, ctx, 1) + token_at * parameter(rec, ATTENTION.out_stride) + 4 * n * head
            finish(scratch + i * stride, padded, out, n)

    @inline
    def attend_split(rec, ctx, scratch, t, h, group, padded, split):
        """One split of one token, left in the partial results."""
        stride = row_bytes(padded)
        position = token(ctx, t, TOKEN_POSITION)
        low = first_visible(rec, position)
        if split < low >> 8 or split > position >> 8:
            return
        prepare_rows(rec, ctx, scratch, t, t + 1, h, group, padded)
        run_split(rec, ctx, scratch, group, t, h, padded, split, low, position)
        for g in range(group):
            row = scratch + g * stride
            index = (t * parameter(rec, ATTENTION.heads) + h * group + g) * parameter(rec, ATTENTION.splits) + split
            partial = place(rec, ctx, 4) + index * partial_bytes(padded)
            store_f32(partial, load_f32(row + S_M))
            store_f32x16(partial + 64, load_f32x16(row + S_L))
            for i in range(0, padded, 16):
                store_f32x16(partial + 128 + 4 * i, load_f32x16(row + S_Q + 4 * padded + 4 * i))

    @kernel(f"attention_{kv}")
    def attention(rec, ctx, tid, n_threads):
        heads, kv_heads, tokens = parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.kv_heads), count(ctx, COUNT_TOKENS)
        group, padded = div_i64(heads, kv_heads), round_up_16(parameter(rec, ATTENTION.head_dim))
        scratch, split_tokens = place(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch), count(ctx, COUNT_MERGE)
        unit = claim(ctx)
        if split_tokens > 0:
            splits = parameter(rec, ATTENTION.splits)
            per_token = kv_heads * splits
            while unit < split_tokens * per_token:
                t = div_i64(unit, per_token)
                h = div_i64(unit - t * per_token, splits)
                attend_split(rec, ctx, scratch, t, h, group, padded, unit - t * per_token - h * splits)
                unit = claim(ctx)
            return 0
        step = parameter(rec, ATTENTION.tokens)
        while unit < div_i64(tokens + step - 1, step) * kv_heads:
            tile = div_i64(unit, kv_heads)
            h = unit - tile * kv_heads
            t, end = tile * step, min(tile * step + step, tokens)
            while t < end:  # tokens of one sequence at a time
                stop = t + 1
                while stop < end and token(ctx, stop, TOKEN_SEQUENCE) == token(ctx, t, TOKEN_SEQUENCE):
                    stop += 1
                attend(rec, ctx, scratch, t, stop, h, group, padded)
                t = stop
            unit = claim(ctx)
        return 0


_register("int8", _scores_int8, prepare_int8, v_scales_int8, load_i8x16, 1)
_register("f16", lambda r: _scores_float(r, load_f16x16, 2), prepare_float, v_scales_float, load_f16x16, 2)
_register("f32", lambda r: _scores_float(r, load_f32x16, 4), prepare_float, v_scales_float, load_f32x16, 4)


@kernel("attention_merge")
def attention_merge(rec, ctx, tid, n_threads):
    """Merge the splits of each (token, head) in index order."""
    heads, n = parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.head_dim)
    padded, splits = round_up_16(n), parameter(rec, ATTENTION.splits)
    row = place(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch)
    unit = claim(ctx)
    while unit < count(ctx, COUNT_MERGE) * heads:
        t = div_i64(unit, heads)
        head = unit - t * heads
        position = token(ctx, t, TOKEN_POSITION)
        clear(row, padded, 1)
        for split in range(first_visible(rec, position) >> 8, (position >> 8) + 1):
            partial = place(rec, ctx, 4) + (unit * splits + split) * partial_bytes(padded)
            merge(row, padded, partial, partial + 64, partial + 128)
        finish(row, padded, place(rec, ctx, 1) + t * parameter(rec, ATTENTION.out_stride) + 4 * n * head, n)
        unit = claim(ctx)
    return 0
