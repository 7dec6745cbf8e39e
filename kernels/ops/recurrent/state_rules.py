"""Delta rule and selective scan: a matrix for each head, which a sequence's tokens change one after the other.

A unit of work is a head of one sequence: its tiles of 32 columns one by one, each with all tokens, so a tile stays in
the first cache. A token costs one pass over the tile where another follows: rows are updated, multiplied by this
token's query, and by the next one's key. abi/state.py says what is replayed and what is stored.

Operands: 0 x, 1 gates, 2 out, 3 a, 4 dt_bias, 5 d, 6 state, 7 scratch. Parameters: parameters.RULE.
Reference: reference/recurrent/state_rules.py.
"""

from __future__ import annotations

from ...abi import (
    COUNT_SEQUENCES,
    CTX_SEQUENCES,
    JOURNAL_TOKENS,
    SEQUENCE_BYTES,
    SEQUENCE_FIRST,
    SEQUENCE_SLOT,
    SEQUENCE_TOKENS,
    STATE_TILE_COLUMNS,
    TOKEN_BASE,
)
from ...parameters import RULE
from ...registry import kernel
from ...vector.instruction import claim, count, float_parameter, inline, operand, parameter, round_up_16, token
from ...vector.lanes import keep_first, splat_f32, vabs, vmax
from ...vector.memory import load_f32, load_f32x16, load_i64, store_f32, store_f32x16, store_first, store_i64
from ...vector.scalars import div_i64
from ...vector.targets import fma
from ...vector.vecmath import exp, sigmoid

_ROW = 4 * STATE_TILE_COLUMNS
_GATES = 4 * JOURNAL_TOKENS
"""Scratch: decays of JOURNAL_TOKENS tokens, as many second gates, then a tile."""


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


def _rule(delta):
    """Return the kernel of the delta rule, or of the selective scan."""

    @inline
    def prepare(inst, ctx, head, gates, stride, n, scratch):
        """Gates of up to JOURNAL_TOKENS tokens: the decay of each, then beta or the time step."""
        heads = parameter(inst, RULE.heads)
        for i in range(n):
            store_f32(scratch + 4 * i, load_f32(gates + i * stride + 4 * (heads * delta + head)))
            store_f32(scratch + _GATES + 4 * i, load_f32(gates + i * stride + 4 * head))
        rate = splat_f32(load_f32(operand(inst, ctx, 3) + 4 * head))
        time = softplus(load_f32x16(scratch) + splat_f32(load_f32(operand(inst, ctx, 4) + 4 * head)))
        if delta:
            beta = splat_f32(float_parameter(inst, RULE.beta_scale)) * sigmoid(load_f32x16(scratch + _GATES))
            store_f32x16(scratch + _GATES, beta)
        else:
            zero = splat_f32(0.0)
            time = vmax(time, splat_f32(float_parameter(inst, RULE.low)))
            time = zero - vmax(zero - time, zero - splat_f32(float_parameter(inst, RULE.high)))
            store_f32x16(scratch + _GATES, time)
        store_f32x16(scratch, exp(rate * time))

    @inline
    def recall(tile, key, rows):
        """S^T k: 32 columns, as two vectors."""
        a0, a1, b0, b1 = splat_f32(0.0), splat_f32(0.0), splat_f32(0.0), splat_f32(0.0)
        for r in range(0, rows - 1, 2):
            k, l, at = splat_f32(load_f32(key + 4 * r)), splat_f32(load_f32(key + 4 * r + 4)), tile + _ROW * r
            a0, a1 = fma(k, load_f32x16(at), a0), fma(k, load_f32x16(at + 64), a1)
            b0, b1 = fma(l, load_f32x16(at + _ROW), b0), fma(l, load_f32x16(at + _ROW + 64), b1)
        if rows & 1:
            k, at = splat_f32(load_f32(key + 4 * rows - 4)), tile + _ROW * (rows - 1)
            a0, a1 = fma(k, load_f32x16(at), a0), fma(k, load_f32x16(at + 64), a1)
        return a0 + b0, a1 + b1

    @inline
    def change(source, target, key, decay, d0, d1, rows):
        """S = decay S + k d^T, from one tile to another or in place."""
        for r in range(rows):
            k, at = splat_f32(load_f32(key + 4 * r)), _ROW * r
            store_f32x16(target + at, fma(k, d0, decay * load_f32x16(source + at)))
            store_f32x16(target + at + 64, fma(k, d1, decay * load_f32x16(source + at + 64)))

    @inline
    def change_and_ask(source, target, key, query, decay, d0, d1, rows, keep):
        """The same, stored only where `keep`, and S^T q of the new S."""
        a0, a1, b0, b1 = splat_f32(0.0), splat_f32(0.0), splat_f32(0.0), splat_f32(0.0)
        for r in range(0, rows - 1, 2):
            k, l, at = splat_f32(load_f32(key + 4 * r)), splat_f32(load_f32(key + 4 * r + 4)), _ROW * r
            p, q = splat_f32(load_f32(query + 4 * r)), splat_f32(load_f32(query + 4 * r + 4))
            s0 = fma(k, d0, decay * load_f32x16(source + at))
            s1 = fma(k, d1, decay * load_f32x16(source + at + 64))
            t0 = fma(l, d0, decay * load_f32x16(source + at + _ROW))
            t1 = fma(l, d1, decay * load_f32x16(source + at + _ROW + 64))
            if keep:
                store_f32x16(target + at, s0)
                store_f32x16(target + at + 64, s1)
                store_f32x16(target + at + _ROW, t0)
                store_f32x16(target + at + _ROW + 64, t1)
            a0, a1, b0, b1 = fma(p, s0, a0), fma(p, s1, a1), fma(q, t0, b0), fma(q, t1, b1)
        if rows & 1:
            k, p = splat_f32(load_f32(key + 4 * rows - 4)), splat_f32(load_f32(query + 4 * rows - 4))
            at = _ROW * (rows - 1)
            s0 = fma(k, d0, decay * load_f32x16(source + at))
            s1 = fma(k, d1, decay * load_f32x16(source + at + 64))
            if keep:
                store_f32x16(target + at, s0)
                store_f32x16(target + at + 64, s1)
            a0, a1 = fma(p, s0, a0), fma(p, s1, a1)
        return a0 + b0, a1 + b1

    @inline
    def addends(tile, key, value, decay, gate, rows, n):
        """Return what is added to the rows of S, times k: beta (v - decay S^T k), or time x value; 0 behind n columns."""
        v0, v1 = keep_first(load_f32x16(value), n), splat_f32(0.0)
        if n > 16:
            v1 = keep_first(load_f32x16(value + 64), n - 16)
        if delta:
            m0, m1 = recall(tile, key, rows)
            v0, v1 = v0 - decay * m0, v1 - decay * m1
        return gate * v0, gate * v1

    @inline
    def replay(inst, ctx, head, tile, journal, stamp, base, values, n, scratch):
        """Take in the journal's tokens from position `stamp` up to `base`."""
        rows, columns = parameter(inst, RULE.key_dim), 4 * round_up_16(parameter(inst, RULE.columns))
        keys = 4 * (parameter(inst, RULE.keys) + div_i64(head, parameter(inst, RULE.group)) * rows)
        size = columns + 4 * round_up_16(parameter(inst, RULE.gate_columns))
        for p in range(stamp, base):
            row = journal + (p & (JOURNAL_TOKENS - 1)) * size
            prepare(inst, ctx, head, row + columns, 0, 1, scratch)
            decay, gate = splat_f32(load_f32(scratch)), splat_f32(load_f32(scratch + _GATES))
            d0, d1 = addends(tile, row + keys, row + values, decay, gate, rows, n)
            change(tile, tile, row + keys, decay, d0, d1, rows)

    @inline
    def run(inst, ctx, head, source, target, first, last, values, n, scratch, keep):
        """Tokens first .. last - 1 of the pass: from the source tile to the target, the last stored only if `keep`."""
        rows, stride, group = parameter(inst, RULE.key_dim), parameter(inst, RULE.x_stride), parameter(inst, RULE.group)
        at = div_i64(head, group) * rows
        keys = 4 * (parameter(inst, RULE.first) + parameter(inst, RULE.keys) + at)
        queries, gates = 4 * (parameter(inst, RULE.queries) + at), parameter(inst, RULE.gates_stride)
        column = values - 4 * parameter(inst, RULE.values)
        values += 4 * parameter(inst, RULE.first)
        for t in range(first, last):
            if (t - first) & (JOURNAL_TOKENS - 1) == 0:
                raw = operand(inst, ctx, 1) + t * gates + 4 * parameter(inst, RULE.gate_start)
                prepare(inst, ctx, head, raw, gates, min(JOURNAL_TOKENS, last - t), scratch)
            i = (t - first) & (JOURNAL_TOKENS - 1)
            decay, gate = splat_f32(load_f32(scratch + 4 * i)), splat_f32(load_f32(scratch + _GATES + 4 * i))
            x = operand(inst, ctx, 0) + t * stride
            d0, d1 = addends(source, x + keys, x + values, decay, gate, rows, n)
            o0, o1 = change_and_ask(source, target, x + keys, x + queries, decay, d0, d1, rows, keep or t < last - 1)
            source = target
            if not delta:
                d = splat_f32(load_f32(operand(inst, ctx, 5) + 4 * head))
                o0 = fma(d, load_f32x16(x + values), o0)
                if n > 16:
                    o1 = fma(d, load_f32x16(x + values + 64), o1)
            out = operand(inst, ctx, 2) + t * parameter(inst, RULE.out_stride) + column
            store_first(out, o0, n)
            if n > 16:
                store_first(out + 64, o1, n - 16)

    @inline
    def advance(inst, ctx, tid, head, slot, tile, part, begin, tokens, base):
        """One tile of a head: replay, then the tokens of the pass."""
        rows, size = parameter(inst, RULE.key_dim), parameter(inst, RULE.value_dim)
        n = min(STATE_TILE_COLUMNS, size - part * STATE_TILE_COLUMNS)
        values = 4 * (parameter(inst, RULE.values) + head * size + part * STATE_TILE_COLUMNS)
        at, stamps = slot + tile * rows * _ROW, slot + parameter(inst, RULE.stamps) + 8 * tile
        scratch = operand(inst, ctx, 7) + tid * parameter(inst, RULE.scratch)
        stamp = load_i64(stamps)
        if base == 0:
            stamp = 0
            for i in range(0, rows * _ROW, 64):
                store_f32x16(at + i, splat_f32(0.0))
        replay(inst, ctx, head, at, slot + parameter(inst, RULE.journal), stamp, base, values, n, scratch)
        stored = 0
        if tokens > JOURNAL_TOKENS:
            stored = ((base + tokens) & -JOURNAL_TOKENS) - base
            run(inst, ctx, head, at, at, begin, begin + stored, values, n, scratch, True)
        store_i64(stamps, base + stored)
        run(inst, ctx, head, at, scratch + 2 * _GATES, begin + stored, begin + tokens, values, n, scratch, False)

    def state_rule(inst, ctx, tid, n_threads):
        heads = parameter(inst, RULE.heads)
        tiles = div_i64(parameter(inst, RULE.value_dim) + STATE_TILE_COLUMNS - 1, STATE_TILE_COLUMNS)
        units = count(ctx, COUNT_SEQUENCES) * heads
        unit = claim(ctx)
        while unit < units:
            number = div_i64(unit, heads)
            head = unit - number * heads
            entry = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * number
            begin, tokens = load_i64(entry + SEQUENCE_FIRST), load_i64(entry + SEQUENCE_TOKENS)
            base, slot = token(ctx, begin, TOKEN_BASE), operand(inst, ctx, 6) + load_i64(entry + SEQUENCE_SLOT)
            for part in range(tiles):
                advance(inst, ctx, tid, head, slot, head * tiles + part, part, begin, tokens, base)
            unit = claim(ctx)
        return 0

    return state_rule


kernel("delta_rule")(_rule(1))
kernel("selective_scan")(_rule(0))


@kernel("state_journal")
def state_journal(inst, ctx, tid, n_threads):
    """Copy what the last tokens of each sequence can be replayed from into its journal."""
    columns, gates = parameter(inst, RULE.columns), parameter(inst, RULE.gate_columns)
    size = 4 * (round_up_16(columns) + round_up_16(gates))
    units = count(ctx, COUNT_SEQUENCES) * JOURNAL_TOKENS
    unit = claim(ctx)
    while unit < units:
        entry = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * div_i64(unit, JOURNAL_TOKENS)
        begin, tokens = load_i64(entry + SEQUENCE_FIRST), load_i64(entry + SEQUENCE_TOKENS)
        base, t = token(ctx, begin, TOKEN_BASE), unit & (JOURNAL_TOKENS - 1)
        if tokens > JOURNAL_TOKENS:
            t += ((base + tokens) & -JOURNAL_TOKENS) - base
        if t < tokens:
            journal = operand(inst, ctx, 6) + load_i64(entry + SEQUENCE_SLOT) + parameter(inst, RULE.journal)
            row = journal + ((base + t) & (JOURNAL_TOKENS - 1)) * size
            x = operand(inst, ctx, 0) + (begin + t) * parameter(inst, RULE.x_stride) + 4 * parameter(inst, RULE.first)
            for i in range(0, columns, 16):
                store_first(row + 4 * i, load_f32x16(x + 4 * i), columns - i)
            row += 4 * round_up_16(columns)
            x = operand(inst, ctx, 1) + (begin + t) * parameter(inst, RULE.gates_stride)
            x += 4 * parameter(inst, RULE.gate_start)
            for i in range(0, gates, 16):
                store_first(row + 4 * i, load_f32x16(x + 4 * i), gates - i)
        unit = claim(ctx)
    return 0
