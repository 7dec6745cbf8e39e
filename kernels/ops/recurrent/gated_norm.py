"""RMS norm of groups of a row with a gate before it or after it, or the gate alone.

Operands: 0 x, 1 gate, 2 out, 3 weight. Parameters: parameters.GATED_NORM. Reference:
reference/recurrent/gated_norm.py.
"""

from __future__ import annotations

from ...parameters import GATED_NORM
from ...registry import kernel
from ...vector.instruction import claim, count, float_parameter, inline, operand, parameter
from ...vector.lanes import first_lane, keep_first, splat_f32, sum_lanes
from ...vector.memory import load_f32x16, store_first
from ...vector.scalars import div_f32, div_i64, f32_of, sqrt_f32
from ...vector.targets import fma
from ...vector.vecmath import sigmoid

UNIT = 1024
"""Elements of a unit of work, about as many: to claim one costs as much as 60 of them."""


@inline
def _gate(address, only_sigmoid):
    """The gate's function of 16 values."""
    v = load_f32x16(address)
    s = sigmoid(v)
    if not only_sigmoid:
        s = v * s
    return s


@inline
def _one_group(x, gate, out, weight, n, normed, gated_first, only_sigmoid, eps):
    """A group of n values."""
    scale = splat_f32(1.0)
    if normed:
        total = splat_f32(0.0)
        for i in range(0, n, 16):
            v = load_f32x16(x + 4 * i)
            if gated_first:
                v = v * _gate(gate + 4 * i, only_sigmoid)
            v = keep_first(v, n - i)
            total = fma(v, v, total)
        mean = div_f32(sum_lanes(total), f32_of(n))
        scale = splat_f32(div_f32(first_lane(splat_f32(1.0)), sqrt_f32(mean + eps)))
    for i in range(0, n, 16):
        v, by = load_f32x16(x + 4 * i), _gate(gate + 4 * i, only_sigmoid)
        if gated_first:
            v = v * by
        if normed:
            v = v * scale * load_f32x16(weight + 4 * i)
        if not gated_first:
            v = v * by
        store_first(out + 4 * i, v, n - i)


@kernel("gated_norm")
def gated_norm(inst, ctx, tid, n_threads):
    """Norm and gate groups of f32 rows; a unit of work is some groups of a row."""
    group, normed = parameter(inst, GATED_NORM.group), parameter(inst, GATED_NORM.normed)
    groups = div_i64(parameter(inst, GATED_NORM.width), group)
    span = max(1, div_i64(UNIT, group))
    blocks = div_i64(groups + span - 1, span)
    units = count(ctx, parameter(inst, GATED_NORM.rows)) * blocks
    unit = claim(ctx)
    while unit < units:
        t = div_i64(unit, blocks)
        first = (unit - t * blocks) * span
        x = operand(inst, ctx, 0) + t * parameter(inst, GATED_NORM.x_stride)
        gate = operand(inst, ctx, 1) + t * parameter(inst, GATED_NORM.gate_stride)
        gate += 4 * parameter(inst, GATED_NORM.start)
        out = operand(inst, ctx, 2) + t * parameter(inst, GATED_NORM.out_stride)
        for i in range(first, min(groups, first + span)):
            at, weight = 4 * group * i, operand(inst, ctx, 3)
            if normed == 1:
                weight += at
            _one_group(x + at, gate + at, out + at, weight, group, normed, parameter(inst, GATED_NORM.gated_first),
                       parameter(inst, GATED_NORM.sigmoid), float_parameter(inst, GATED_NORM.eps))
        unit = claim(ctx)
    return 0
