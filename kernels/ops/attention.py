"""Attention over KV blocks, split along the context as Flash-Decoding does (log-sum-exp merge: arXiv 2205.14135).

A context is cut into splits of SPLIT_BLOCKS blocks. Of each split come (m, l, acc): the largest score, the sum of
exponentials (16 lanes) and the weighted sum of V (attention_split.py); splits are merged in index order
(attention_rows.py). Whether splits run on different threads and are merged by the next record (few tokens, long
context) or one after the other here, the operations on a row are the same in the same order, so the result has the
same bits. So has a row in a tile of any number of rows, and a token of a tree whose path was run as a chain: splits
and lanes go by its place in the path (attention_paths.py).

Operands: 0 qkv rows, 1 out rows, 2 the layer's blocks, 3 scratch, 4 partial results. Parameters: parameters.ATTENTION.
Twin: reference/attention.py.
"""

from __future__ import annotations

from ..abi import COUNT_MERGE, TOKEN_ROW, TOKEN_SEQUENCE
from ..parameters import ATTENTION
from ..registry import kernel
from ..vector.record import claim, count, float_parameter, inline, operand, parameter, round_up_16, token
from ..vector.simd import div_i64, load_f32, load_f32x16, load_i64, store_f32, store_f32x16, store_i64
from ..vector.targets import attention_tiles
from .attention_paths import has_path, place_of
from .attention_rows import (
    SPLIT_SHIFT,
    T_HIGH,
    T_L,
    T_LOW,
    T_M,
    acc_at,
    clear_merged,
    finish,
    first_visible,
    merge,
    partial_bytes,
)
from .attention_split import KINDS, split_step


@inline
def _query(t, row, last, h, group):
    """Token and query head of a row of KV head h, counted from the first head of token t.

    A tile may have more rows than are left: the rows after the last one repeat it, and write the same bits twice.
    """
    row = min(row, last)
    token_at = t + div_i64(row, group)
    return token_at, h * group + row - (token_at - t) * group


def _tile_step(kind, r, widths, chains):
    """What a tile of r rows goes through: all splits merged here, or one split left in the partial results."""
    step, prepare = split_step(kind, r, widths, chains), kind.prepare(r)

    @inline
    def start(rec, ctx, tile, t, row, last, h, group):
        n = parameter(rec, ATTENTION.head_dim)
        for i in range(r):
            token_at, head = _query(t, row + i, last, h, group)
            place = place_of(ctx, token_at)
            q = operand(rec, ctx, 0) + token_at * parameter(rec, ATTENTION.q_stride) + 4 * n * head
            prepare(tile, i, q, n, float_parameter(rec, ATTENTION.scale))
            store_i64(tile + T_LOW + 8 * i, first_visible(rec, place))
            store_i64(tile + T_HIGH + 8 * i, place)

    @inline
    def whole(rec, ctx, tile, t, row, last, h, group, padded):
        """All splits that the rows see, merged as they come."""
        start(rec, ctx, tile, t, row, last, h, group)
        for i in range(r):
            clear_merged(tile, i, padded)
        low, high = load_i64(tile + T_LOW), load_i64(tile + T_HIGH + 8 * (r - 1))
        final = high >> SPLIT_SHIFT
        for s in range(low >> SPLIT_SHIFT, final + 1):
            ahead = (t, h, min(s + 1, token(ctx, t, TOKEN_ROW) >> SPLIT_SHIFT))
            step(rec, ctx, tile, (t, h, s), low, high, padded, ahead)
            for i in range(r):
                sums = tile + acc_at(padded) + 4 * i * padded
                merge(tile, i, padded, tile + T_M + 4 * i, tile + T_L + 64 * i, sums)
        n = parameter(rec, ATTENTION.head_dim)
        for i in range(r):
            token_at, head = _query(t, row + i, last, h, group)
            out = operand(rec, ctx, 1) + token_at * parameter(rec, ATTENTION.out_stride) + 4 * n * head
            finish(tile, i, padded, out, n)

    @inline
    def single(rec, ctx, tile, unit, row, group, padded, fresh, ahead):
        """One split of one token; `fresh` says that the tile does not hold its queries yet."""
        t, h, split = unit
        if fresh:
            start(rec, ctx, tile, t, row, group - 1, h, group)
        low, high = load_i64(tile + T_LOW), load_i64(tile + T_HIGH + 8 * (r - 1))
        if low >> SPLIT_SHIFT <= split and split <= high >> SPLIT_SHIFT:
            step(rec, ctx, tile, unit, low, high, padded, ahead)
            for i in range(r):
                _token, head = _query(t, row + i, group - 1, h, group)
                index = (t * parameter(rec, ATTENTION.heads) + head) * parameter(rec, ATTENTION.splits) + split
                partial = operand(rec, ctx, 4) + index * partial_bytes(padded)
                store_f32(partial, load_f32(tile + T_M + 4 * i))
                store_f32x16(partial + 64, load_f32x16(tile + T_L + 64 * i))
                for k in range(0, padded, 16):
                    store_f32x16(partial + 128 + 4 * k, load_f32x16(tile + acc_at(padded) + 4 * (i * padded + k)))

    return whole, single


@inline
def _splits_seen(rec, ctx, tokens):
    """First split that any of the tokens sees, and how many from there on."""
    place = place_of(ctx, 0)
    lowest, highest = first_visible(rec, place), place
    for t in range(1, tokens):
        place = place_of(ctx, t)
        lowest, highest = min(lowest, first_visible(rec, place)), max(highest, place)
    first = lowest >> SPLIT_SHIFT
    return first, (highest >> SPLIT_SHIFT) - first + 1


@inline
def _unit(number, kv_heads, first, splits):
    """(token, KV head, split) of a unit of work: all splits of a head one after the other."""
    head = div_i64(number, splits)
    t = div_i64(head, kv_heads)
    return t, head - t * kv_heads, first + number - head * splits


def _prompt(large, small, many, some, one):
    """Attention of tiles of tokens, each with all splits."""

    @inline
    def attend(rec, ctx, tile, t, end, h, group, padded):
        """Tokens t .. end, which may share tiles, of KV head h."""
        rows, row = (end - t) * group, 0
        while row < rows:
            if rows - row > small:
                many(rec, ctx, tile, t, row, rows - 1, h, group, padded)
                row += large
            elif rows - row > 1:
                some(rec, ctx, tile, t, row, rows - 1, h, group, padded)
                row += small
            else:
                one(rec, ctx, tile, t, row, rows - 1, h, group, padded)
                row += 1

    @inline
    def together(ctx, t, other):
        """Whether two tokens may share a tile: of one sequence, and neither with a path of its own."""
        same = token(ctx, t, TOKEN_SEQUENCE) == token(ctx, other, TOKEN_SEQUENCE)
        return same and not has_path(ctx, t) and not has_path(ctx, other)

    @inline
    def prompt(rec, ctx, tile, group, padded):
        kv_heads, tokens = parameter(rec, ATTENTION.kv_heads), count(ctx, parameter(rec, ATTENTION.rows))
        step = parameter(rec, ATTENTION.tokens)
        unit = claim(ctx)
        while unit < div_i64(tokens + step - 1, step) * kv_heads:
            token_tile = div_i64(unit, kv_heads)
            t, end = token_tile * step, min(token_tile * step + step, tokens)
            while t < end:
                stop = t + 1
                while stop < end and together(ctx, t, stop):
                    stop += 1
                attend(rec, ctx, tile, t, stop, unit - token_tile * kv_heads, group, padded)
                t = stop
            unit = claim(ctx)

    return prompt


def _decode(large, small, many, some, one):
    """Attention of few tokens, split by split; the next split is claimed early, so that its K can be asked for."""

    @inline
    def decode(rec, ctx, tile, group, padded):
        kv_heads, tokens = parameter(rec, ATTENTION.kv_heads), count(ctx, COUNT_MERGE)
        first, splits = _splits_seen(rec, ctx, tokens)
        heads, held, number = tokens * kv_heads, -1, claim(ctx)
        while number < heads * splits:
            following = claim(ctx)
            unit = _unit(number, kv_heads, first, splits)
            ahead = _unit(min(following, heads * splits - 1), kv_heads, first, splits)
            head, row = unit[0] * kv_heads + unit[1], 0
            fresh = held != head or group > large
            while row < group:
                if group - row > small:
                    many(rec, ctx, tile, unit, row, group, padded, fresh, ahead)
                    row += large
                elif group - row > 1:
                    some(rec, ctx, tile, unit, row, group, padded, fresh, ahead)
                    row += small
                else:
                    one(rec, ctx, tile, unit, row, group, padded, fresh, ahead)
                    row += 1
            held, number = head, following

    return decode


def _register(kv, tiles):
    """Kernel of a KV type; rows go through in tiles of three heights."""
    (large, *_), (small, *_), _one = tiles
    steps = [_tile_step(KINDS[kv], *tile) for tile in tiles]
    prompt = _prompt(large, small, *(whole for whole, _single in steps))
    decode = _decode(large, small, *(single for _whole, single in steps))

    @kernel(f"attention_{kv}")
    def attention(rec, ctx, tid, n_threads):
        group = div_i64(parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.kv_heads))
        padded = round_up_16(parameter(rec, ATTENTION.head_dim))
        tile = operand(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch)
        if count(ctx, COUNT_MERGE) > 0:
            decode(rec, ctx, tile, group, padded)
        else:
            prompt(rec, ctx, tile, group, padded)
        return 0


for _kv in KINDS:
    _register(_kv, attention_tiles())


@kernel("attention_merge")
def attention_merge(rec, ctx, tid, n_threads):
    """Merge the splits of each (token, head) in index order."""
    heads, n = parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.head_dim)
    padded, splits = round_up_16(n), parameter(rec, ATTENTION.splits)
    tile = operand(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch)
    unit = claim(ctx)
    while unit < count(ctx, COUNT_MERGE) * heads:
        t = div_i64(unit, heads)
        head = unit - t * heads
        place = place_of(ctx, t)
        clear_merged(tile, 0, padded)
        for split in range(first_visible(rec, place) >> SPLIT_SHIFT, (place >> SPLIT_SHIFT) + 1):
            partial = operand(rec, ctx, 4) + (unit * splits + split) * partial_bytes(padded)
            merge(tile, 0, padded, partial, partial + 64, partial + 128)
        finish(tile, 0, padded, operand(rec, ctx, 1) + t * parameter(rec, ATTENTION.out_stride) + 4 * n * head, n)
        unit = claim(ctx)
    return 0
