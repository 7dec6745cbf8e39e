"""Merge of the splits of each (token, head) in index order, and the replacement for omitted V.

Operands: 1 out rows, 3 scratch, 4 partial results; if V may have been omitted (FLAG_LAST) 5 rows of scores with the
selection, 7 means; 8 as in attention.py. Parameters: parameters.ATTENTION. Reference: reference/attention/attention.py.
"""

from __future__ import annotations

from ...abi import FLAG_LAST, INSTEAD_MEAN, INSTEAD_SCALE
from ...parameters import ATTENTION
from ...registry import kernel
from ...vector.lanes import first_lane, splat_f32, sum_lanes
from ...vector.memory import load_f32, load_f32x16, store_first
from ...vector.record import claim, count, flags, operand, outlined, parameter, round_up_16
from ...vector.scalars import div_f32, div_i64, max_f32
from ...vector.targets import fma
from .attention_paths import place_of
from .attention_rows import (
    LOWEST,
    SPLIT_SHIFT,
    T_MERGED_L,
    finish,
    first_visible,
    merge,
    merged_at,
    partial_bytes,
    start_merge,
    value_dim,
)
from .attention_scores import first_scored, score_row
from .attention_select import C_SUM, all_wanted, choice_at
from .attention_units import first_split
from .attention_values import mean_at


@outlined
def _finish_part(rec, ctx, tile, t, head, padded, out):
    """out = what was read / the sum of all exponentials, and for the rest a mean of V or nothing."""
    one = first_lane(splat_f32(1.0))
    inverse = div_f32(one, load_f32(choice_at(rec, score_row(rec, ctx, t, head)) + C_SUM))
    read = sum_lanes(load_f32x16(tile + T_MERGED_L)) * inverse
    rest, means = splat_f32(0.0), tile + merged_at(padded)
    if parameter(rec, ATTENTION.instead) == INSTEAD_MEAN:
        group = div_i64(parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.kv_heads))
        rest, means = splat_f32(max_f32(one - read, 0 * one)), mean_at(rec, ctx, t, div_i64(head, group), padded)
    acc, n = tile + merged_at(padded), parameter(rec, ATTENTION.head_dim)
    for k in range(0, n, 16):
        y = fma(load_f32x16(means + 4 * k), rest, load_f32x16(acc + 4 * k) * splat_f32(inverse))
        store_first(out + 4 * k, y, min(16, n - k))


@outlined
def _is_whole(rec, ctx, t, head, padded):
    """Whether the weights of what was read add up to 1: as asked, or nothing was left out, or nothing stands for it."""
    instead = parameter(rec, ATTENTION.instead)
    if instead == INSTEAD_SCALE or all_wanted(choice_at(rec, score_row(rec, ctx, t, head))):
        return True
    group = div_i64(parameter(rec, ATTENTION.heads), parameter(rec, ATTENTION.kv_heads))
    no_mean = load_f32(mean_at(rec, ctx, t, div_i64(head, group), padded) + 4 * padded) == 0.0
    return instead == INSTEAD_MEAN and no_mean


@kernel("attention_merge")
def attention_merge(rec, ctx, tid, n_threads):
    """Merge the splits of each (token, query head)."""
    heads, n = parameter(rec, ATTENTION.heads), value_dim(rec)
    padded, splits = round_up_16(n), parameter(rec, ATTENTION.splits)
    tile = operand(rec, ctx, 3) + tid * parameter(rec, ATTENTION.scratch)
    chosen = flags(rec) & FLAG_LAST
    rows = count(ctx, parameter(rec, ATTENTION.rows))
    first = first_scored(rec, ctx) if chosen else first_split(ctx)
    unit, units = claim(ctx), (rows if chosen else rows - first) * heads
    while unit < units:
        t = first + div_i64(unit, heads)
        head = unit - (t - first) * heads
        place = place_of(ctx, t)
        start_merge(rec, ctx, tile, 0, padded, head)
        for split in range(first_visible(rec, place) >> SPLIT_SHIFT, (place >> SPLIT_SHIFT) + 1):
            partial = operand(rec, ctx, 4) + (unit * splits + split) * partial_bytes(padded)
            if load_f32(partial) > LOWEST:
                merge(tile, 0, padded, partial, partial + 64, partial + 128)
        out = operand(rec, ctx, 1) + t * parameter(rec, ATTENTION.out_stride) + 4 * n * head
        if not chosen or _is_whole(rec, ctx, t, head, padded):
            finish(tile, 0, padded, out, n)
        else:
            _finish_part(rec, ctx, tile, t, head, padded, out)
        unit = claim(ctx)
    return 0
