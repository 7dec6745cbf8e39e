"""Gates of delta rule and selective scan: what each token of a block has for one head, whatever the column.

Scratch has three rows of GATE_TOKENS numbers: the decay of each token, beta or the time step, and the product of key
and query. Tokens of the journal come first, position p at p % JOURNAL_TOKENS, then those of the block.
"""

from __future__ import annotations

from ...abi import GATE_TOKENS, JOURNAL_TOKENS
from ...parameters import RULE
from ...vector.instruction import float_parameter, inline, operand, parameter, round_up_16
from ...vector.lanes import keep_first, splat_f32, sum_lanes, vabs, vmax
from ...vector.memory import load_f32, load_f32x16, store_f32, store_f32x16
from ...vector.scalars import div_i64
from ...vector.targets import fma
from ...vector.vecmath import exp, sigmoid

GATE_ROW = 4 * GATE_TOKENS


@inline
def log1p_below(y):
    """log(1 + y) of 0 <= y <= 1 within 2 ulp: 2 atanh(y / (2 + y)) as a series."""
    s = y / (splat_f32(2.0) + y)
    z = s * s
    p = splat_f32(1.0 / 15)
    p = fma(p, z, splat_f32(1.0 / 13))
    p = fma(p, z, splat_f32(1.0 / 11))
    p = fma(p, z, splat_f32(1.0 / 9))
    p = fma(p, z, splat_f32(1.0 / 7))
    p = fma(p, z, splat_f32(1.0 / 5))
    p = fma(p, z, splat_f32(1.0 / 3))
    return (s + s) * fma(p, z, splat_f32(1.0))


@inline
def softplus(x):
    """log(1 + e^x)."""
    return vmax(x, splat_f32(0.0)) + log1p_below(exp(splat_f32(0.0) - vabs(x)))


@inline
def dot(x, y, n):
    """Product of two rows of n floats."""
    total = splat_f32(0.0)
    for i in range(0, n - 15, 16):
        total = fma(load_f32x16(x + 4 * i), load_f32x16(y + 4 * i), total)
    if n & 15:
        i = n & -16
        total = fma(keep_first(load_f32x16(x + 4 * i), n - i), keep_first(load_f32x16(y + 4 * i), n - i), total)
    return sum_lanes(total)


def gates_of(delta):
    """Return the function that prepares a block of a delta rule or of a selective scan."""

    @inline
    def prepare(inst, ctx, head, raw, stride, n, to):
        """Decays and second gates of up to 16 tokens."""
        heads = parameter(inst, RULE.heads)
        for i in range(n):
            store_f32(to + 4 * i, load_f32(raw + i * stride + 4 * (heads * delta + head)))
            store_f32(to + GATE_ROW + 4 * i, load_f32(raw + i * stride + 4 * head))
        rate = splat_f32(load_f32(operand(inst, ctx, 3) + 4 * head))
        time = softplus(load_f32x16(to) + splat_f32(load_f32(operand(inst, ctx, 4) + 4 * head)))
        if delta:
            beta = splat_f32(float_parameter(inst, RULE.beta_scale)) * sigmoid(load_f32x16(to + GATE_ROW))
            store_f32x16(to + GATE_ROW, beta)
        else:
            zero = splat_f32(0.0)
            time = vmax(time, splat_f32(float_parameter(inst, RULE.low)))
            time = zero - vmax(zero - time, zero - splat_f32(float_parameter(inst, RULE.high)))
            store_f32x16(to + GATE_ROW, time)
        store_f32x16(to, exp(rate * time))

    @inline
    def gates(inst, ctx, head, journal, begin, n, to):
        """Prepare a block of n tokens, and the journal's if there is one."""
        columns, stride = 4 * round_up_16(parameter(inst, RULE.columns)), parameter(inst, RULE.gates_stride)
        if journal:
            size = columns + 4 * round_up_16(parameter(inst, RULE.gate_columns))
            prepare(inst, ctx, head, journal + columns, size, JOURNAL_TOKENS, to)
        to += 4 * JOURNAL_TOKENS
        raw = operand(inst, ctx, 1) + begin * stride + 4 * parameter(inst, RULE.gate_start)
        for i in range(0, n, 16):
            prepare(inst, ctx, head, raw + i * stride, stride, min(16, n - i), to + 4 * i)
        rows = parameter(inst, RULE.key_dim)
        at = div_i64(head, parameter(inst, RULE.group)) * rows
        x = operand(inst, ctx, 0) + begin * parameter(inst, RULE.x_stride) + 4 * at
        key = x + 4 * (parameter(inst, RULE.first) + parameter(inst, RULE.keys))
        query = x + 4 * parameter(inst, RULE.queries)
        for i in range(n):
            store_f32(to + 2 * GATE_ROW + 4 * i, dot(key, query, rows))
            key, query = key + parameter(inst, RULE.x_stride), query + parameter(inst, RULE.x_stride)

    return gates
