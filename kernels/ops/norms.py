"""Norms beyond RMS norm: LayerNorm (mean subtracted, with a bias), in place, or of a term before it joins the residual.

They have their own file because only some architectures use them. The RMS norm that a matmul can fuse for a single
token is in elementwise.py.

Operands: 0 source, 1 out, 2 weight, 3 scratch, 4 bias, 5 scalar. Parameters: parameters.ROWS. Flags: FLAG_CENTRED,
FLAG_BIAS, FLAG_RESIDUAL, FLAG_SCALED. Reference: reference/norms.py.
"""

from __future__ import annotations

from ..abi import FLAG_BIAS, FLAG_CENTRED, FLAG_RESIDUAL, FLAG_SCALED
from ..parameters import ROWS
from ..registry import kernel
from ..vector.instruction import claim, count, flags, float_parameter, inline, operand, outlined, parameter
from ..vector.lanes import first_lane, keep_first, splat_f32, sum_lanes
from ..vector.memory import load_f32, load_f32x16, store_f32x16, store_first
from ..vector.scalars import div_f32, div_i64, f32_of, sqrt_f32
from ..vector.targets import fma
from .elementwise import block, n_blocks, quantise_row


@inline
def _mean(x, width):
    """Mean of `width` floats."""
    total = splat_f32(0.0)
    for i in range(0, width, 16):
        total = total + keep_first(load_f32x16(x + 4 * i), width - i)
    return div_f32(sum_lanes(total), f32_of(width))


@inline
def _scale(x, width, mean, eps):
    """1 / sqrt(mean((x - mean)^2) + eps) of `width` floats."""
    total = splat_f32(0.0)
    for i in range(0, width, 16):
        v = keep_first(load_f32x16(x + 4 * i) - mean, width - i)
        total = fma(v, v, total)
    return div_f32(first_lane(splat_f32(1.0)), sqrt_f32(div_f32(sum_lanes(total), f32_of(width)) + eps))


@outlined
def _norm_row(inst, ctx, x, out, whole):
    """One row: (x - mean) * scale * weight + bias; added to `out` with FLAG_RESIDUAL, then times a number.

    `whole` rows are written to the end of the last vector, zeros after their width; else nothing is after it.
    """
    bits, width, weight, bias = flags(inst), parameter(inst, ROWS.width), operand(inst, ctx, 2), operand(inst, ctx, 4)
    mean = splat_f32(0.0)
    if bits & FLAG_CENTRED:
        mean = splat_f32(_mean(x, width))
    scale = splat_f32(_scale(x, width, mean, float_parameter(inst, ROWS.eps)))
    for i in range(0, width, 16):
        v = (load_f32x16(x + 4 * i) - mean) * scale * load_f32x16(weight + 4 * i)
        if bits & FLAG_BIAS:
            v = v + load_f32x16(bias + 4 * i)
        if bits & FLAG_RESIDUAL:
            v = v + load_f32x16(out + 4 * i)
        if bits & FLAG_SCALED:
            v = v * splat_f32(load_f32(operand(inst, ctx, 5)))
        if whole:
            store_f32x16(out + 4 * i, keep_first(v, width - i))
        else:
            store_first(out + 4 * i, v, min(16, width - i))


@kernel("norm_f32")
def norm_f32(inst, ctx, tid, n_threads):
    """Norm of f32 rows, or of each part of them: out = norm(x), in place where out is x, out + norm(x) with
    FLAG_RESIDUAL.
    """
    x, out, parts = operand(inst, ctx, 0), operand(inst, ctx, 1), max(parameter(inst, ROWS.parts), 1)
    whole, units = x != out and parts == 1, count(ctx, parameter(inst, ROWS.rows)) * parts
    unit = claim(ctx)
    while unit < units:
        t = div_i64(unit, parts)
        at = 4 * (unit - t * parts) * parameter(inst, ROWS.width)
        _norm_row(inst, ctx, x + t * parameter(inst, ROWS.in_stride) + at, out + t * parameter(inst, ROWS.out_stride)
                  + at,
                  whole)
        unit = claim(ctx)
    return 0


@kernel("norm_q8")
def norm_q8(inst, ctx, tid, n_threads):
    """Norm of f32 rows, quantised on the way out; operand 3 holds a row of floats per thread."""
    x, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    row = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
    unit = claim(ctx)
    while unit < n_blocks(rows):
        first, n = block(unit, 0, rows)
        base = out + first * parameter(inst, ROWS.out_stride)
        for j in range(n):
            _norm_row(inst, ctx, x + (first + j) * parameter(inst, ROWS.in_stride), row, True)
            quantise_row(row, base, j, n, parameter(inst, ROWS.width), parameter(inst, ROWS.group),
                         parameter(inst, ROWS.scales), parameter(inst, ROWS.offsets))
        unit = claim(ctx)
    return 0
