"""Merge of the splits of each (token, head) in index order, and the replacement for omitted V.

Operands: 1 out rows, 3 scratch, 4 partial results; if V may have been omitted (FLAG_LAST) 5 rows of scores with the
selection, 7 means; 8 as in attention.py. Parameters: parameters.ATTENTION. Reference: reference/attention/attention.py.
"""

from __future__ import annotations

from ...abi import FLAG_LAST, INSTEAD_MEAN, INSTEAD_SCALE
from ...parameters import ATTENTION
from ...registry import kernel
from ...vector.instruction import claim, count, flags, operand, outlined, parameter, round_up_16
from ...vector.lanes import first_lane, splat_f32, sum_lanes
from ...vector.memory import load_f32, load_f32x16, store_first
from ...vector.scalars import div_f32, div_i64, max_f32
from ...vector.targets import fma
from .attention_paths import position_of
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
def _finish_part(inst, ctx, tile, t, head, padded, out):
    """out = the sum of read rows / the sum of all exponentials, and for the rest a mean of V or nothing."""
    one = first_lane(splat_f32(1.0))
    inverse = div_f32(one, load_f32(choice_at(inst, score_row(inst, ctx, t, head)) + C_SUM))
    read = sum_lanes(load_f32x16(tile + T_MERGED_L)) * inverse
    rest, means = splat_f32(0.0), tile + merged_at(padded)
    if parameter(inst, ATTENTION.instead) == INSTEAD_MEAN:
        group = div_i64(parameter(inst, ATTENTION.heads), parameter(inst, ATTENTION.kv_heads))
        rest, means = splat_f32(max_f32(one - read, 0 * one)), mean_at(inst, ctx, t, div_i64(head, group), padded)
    acc, n = tile + merged_at(padded), parameter(inst, ATTENTION.head_dim)
    for k in range(0, n, 16):
        y = fma(load_f32x16(means + 4 * k), rest, load_f32x16(acc + 4 * k) * splat_f32(inverse))
        store_first(out + 4 * k, y, min(16, n - k))


@outlined
def _is_whole(inst, ctx, t, head, padded):
    """Return whether the weights of the rows that were read add up to 1: on request, or because none was left out, or
    because nothing stands for those left out."""
    instead = parameter(inst, ATTENTION.instead)
    if instead == INSTEAD_SCALE or all_wanted(choice_at(inst, score_row(inst, ctx, t, head))):
        return True
    group = div_i64(parameter(inst, ATTENTION.heads), parameter(inst, ATTENTION.kv_heads))
    no_mean = load_f32(mean_at(inst, ctx, t, div_i64(head, group), padded) + 4 * padded) == 0.0
    return instead == INSTEAD_MEAN and no_mean


@kernel("attention_merge")
def attention_merge(inst, ctx, tid, n_threads):
    """Merge the splits of each (token, query head)."""
    heads, n = parameter(inst, ATTENTION.heads), value_dim(inst)
    padded, splits = round_up_16(n), parameter(inst, ATTENTION.splits)
    tile = operand(inst, ctx, 3) + tid * parameter(inst, ATTENTION.scratch)
    chosen = flags(inst) & FLAG_LAST
    rows = count(ctx, parameter(inst, ATTENTION.rows))
    first = first_scored(inst, ctx) if chosen else first_split(ctx)
    unit, units = claim(ctx), (rows if chosen else rows - first) * heads
    while unit < units:
        t = first + div_i64(unit, heads)
        head = unit - (t - first) * heads
        position = position_of(ctx, t)
        start_merge(inst, ctx, tile, 0, padded, head)
        for split in range(first_visible(inst, position) >> SPLIT_SHIFT, (position >> SPLIT_SHIFT) + 1):
            partial = operand(inst, ctx, 4) + (unit * splits + split) * partial_bytes(padded)
            if load_f32(partial) > LOWEST:
                merge(tile, 0, padded, partial, partial + 64, partial + 128)
        out = operand(inst, ctx, 1) + t * parameter(inst, ATTENTION.out_stride) + 4 * n * head
        if not chosen or _is_whole(inst, ctx, t, head, padded):
            finish(tile, 0, padded, out, n)
        else:
            _finish_part(inst, ctx, tile, t, head, padded, out)
        unit = claim(ctx)
    return 0
