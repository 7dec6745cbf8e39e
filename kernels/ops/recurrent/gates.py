"""Gates of delta rule and selective scan: values of each token of a block for one head, whatever the column.

Scratch has three rows of GATE_TOKENS numbers: the decay of each token, beta or the time step, and the product of key
and query. Tokens of the journal come first, position p at p % JOURNAL_TOKENS, then those of the block. With a decay for
each row of the state the first of these rows is unused; after the tile of a thread's scratch each token has three
vectors of key_dim numbers: its decays, and their products with its query and its key.
"""

from __future__ import annotations

from ...abi import GATE_TOKENS, JOURNAL_TOKENS, STATE_TILE_COLUMNS
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


@inline
def vectors_bytes(inst):
    """Bytes of the three vectors that a token has where each row of the state decays by itself."""
    return 3 * 4 * round_up_16(parameter(inst, RULE.key_dim))


@inline
def vectors_of(inst, scratch, i):
    """Address of those of token i of the scratch."""
    tile = 4 * STATE_TILE_COLUMNS * parameter(inst, RULE.key_dim)
    return scratch + 3 * GATE_ROW + tile + i * vectors_bytes(inst)


def gates_of(delta, by_row):
    """Return the function that prepares a block of a delta rule or of a selective scan; `by_row`: each row decays."""

    @inline
    def prepare(inst, ctx, head, raw, stride, n, to):
        """Decays and second gates of up to 16 tokens."""
        heads = parameter(inst, RULE.heads)
        for i in range(n):
            if not by_row:
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
        if not by_row:
            store_f32x16(to, exp(rate * time))

    @inline
    def decays(inst, ctx, head, raw, key, query, to):
        """Decays of all rows for one token, and their products with its query and its key."""
        rows = parameter(inst, RULE.key_dim)
        raw += 4 * (round_up_16(parameter(inst, RULE.heads)) + head * rows)
        bias, part = operand(inst, ctx, 4) + 4 * head * rows, 4 * round_up_16(rows)
        rate = splat_f32(load_f32(operand(inst, ctx, 3) + 4 * head))
        for i in range(0, 4 * rows, 64):
            decay = exp(rate * softplus(load_f32x16(raw + i) + load_f32x16(bias + i)))
            store_f32x16(to + i, decay)
            store_f32x16(to + part + i, decay * load_f32x16(query + i))
            store_f32x16(to + 2 * part + i, decay * load_f32x16(key + i))

    @inline
    def gates(inst, ctx, head, journal, oldest, begin, n, base, to):
        """Prepare a block of n tokens, and the journal's if there is one; rows decay by its tokens from `oldest` on."""
        columns, stride = 4 * round_up_16(parameter(inst, RULE.columns)), parameter(inst, RULE.gates_stride)
        if journal:
            size = columns + 4 * round_up_16(parameter(inst, RULE.gate_columns))
            prepare(inst, ctx, head, journal + columns, size, JOURNAL_TOKENS, to)
        rows = parameter(inst, RULE.key_dim)
        at, own = div_i64(head, parameter(inst, RULE.group)) * rows, vectors_of(inst, to, 0)
        if by_row and journal:
            size = columns + 4 * round_up_16(parameter(inst, RULE.gate_columns))
            for position in range(oldest, base):
                i = position & (JOURNAL_TOKENS - 1)
                row = journal + i * size
                key = row + 4 * (parameter(inst, RULE.keys) + at)
                decays(inst, ctx, head, row + columns, key, key, own + i * vectors_bytes(inst))
        to += 4 * JOURNAL_TOKENS
        raw = operand(inst, ctx, 1) + begin * stride + 4 * parameter(inst, RULE.gate_start)
        for i in range(0, n, 16):
            prepare(inst, ctx, head, raw + i * stride, stride, min(16, n - i), to + 4 * i)
        x = operand(inst, ctx, 0) + begin * parameter(inst, RULE.x_stride) + 4 * at
        key = x + 4 * (parameter(inst, RULE.first) + parameter(inst, RULE.keys))
        query = x + 4 * parameter(inst, RULE.queries)
        for i in range(n):
            store_f32(to + 2 * GATE_ROW + 4 * i, dot(key, query, rows))
            if by_row:
                decays(inst, ctx, head, raw + i * stride, key, query, own + (JOURNAL_TOKENS + i) * vectors_bytes(inst))
            key, query = key + parameter(inst, RULE.x_stride), query + parameter(inst, RULE.x_stride)

    return gates
