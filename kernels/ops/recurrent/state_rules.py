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
from ...vector.lanes import keep_first, splat_f32, sum_lanes, vabs, vmax
from ...vector.memory import load_f32, load_f32x16, load_i64, store_f32, store_f32x16, store_first, store_i64
from ...vector.scalars import div_i64
from ...vector.state_rows import add_read, add_tiles, changed_row, load_tile, vector_of, with_vector
from ...vector.targets import fma, state_vectors
from ...vector.tiles import store_tile, zero_tile
from ...vector.vecmath import exp, sigmoid

_ROW = 4 * STATE_TILE_COLUMNS
_GATES = 4 * JOURNAL_TOKENS
"""Scratch: decays of JOURNAL_TOKENS tokens, as many second gates, products k . q, then a tile."""
VECTORS = state_vectors()
"""Vectors of a row that are in work at once."""


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


def _rule(delta):
    """Return the kernel of the delta rule, or of the selective scan."""
    READ = VECTORS * (1 + delta)

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
    def read(tile, query, apart, rows):
        """S^T q, and of a delta rule S^T k, whose key is `apart` bytes after q."""
        a, b = zero_tile(READ), zero_tile(READ)
        for r in range(0, rows - 1, 2):
            at = tile + _ROW * r
            a = add_read(a, load_tile(VECTORS, at), query + 4 * r, apart)
            b = add_read(b, load_tile(VECTORS, at + _ROW), query + 4 * r + 4, apart)
        if rows & 1:
            a = add_read(a, load_tile(VECTORS, tile + _ROW * (rows - 1)), query + 4 * (rows - 1), apart)
        return add_tiles(a, b)

    @inline
    def change(source, target, addend, key, decay, rows):
        """S = decay S + k d^T, from one tile to another or in place."""
        for r in range(rows):
            at = _ROW * r
            store_tile(changed_row(addend, source + at, key + 4 * r, decay), target + at, 64)

    @inline
    def change_and_read(source, target, addend, key, decay, query, apart, rows):
        """`change`, then `read`, in one pass over the tile."""
        a, b = zero_tile(READ), zero_tile(READ)
        for r in range(0, rows - 1, 2):
            at = _ROW * r
            changed = changed_row(addend, source + at, key + 4 * r, decay)
            store_tile(changed, target + at, 64)
            a = add_read(a, changed, query + 4 * r, apart)
            changed = changed_row(addend, source + at + _ROW, key + 4 * r + 4, decay)
            store_tile(changed, target + at + _ROW, 64)
            b = add_read(b, changed, query + 4 * r + 4, apart)
        if rows & 1:
            r, at = rows - 1, _ROW * (rows - 1)
            changed = changed_row(addend, source + at, key + 4 * r, decay)
            store_tile(changed, target + at, 64)
            a = add_read(a, changed, query + 4 * r, apart)
        return add_tiles(a, b)

    @inline
    def addends(found, value, decay, gate, n):
        """d: beta (v - decay S^T k), or time x value; 0 behind n columns."""
        v = keep_first(load_f32x16(value), n)
        if delta:
            v = v - decay * vector_of(found, VECTORS)
        out = with_vector(zero_tile(VECTORS), 0, gate * v)
        if VECTORS == 2:
            v = splat_f32(0.0)
            if n > 16:
                v = keep_first(load_f32x16(value + 64), n - 16)
            if delta:
                v = v - decay * vector_of(found, 3)
            out = with_vector(out, 1, gate * v)
        return out

    @inline
    def give(inst, ctx, head, out, found, addend, value, decay, both, n):
        """Store decay S^T q + (k . q) d, which is what the changed state gives; a scan adds its skip."""
        o = fma(both, vector_of(addend, 0), decay * vector_of(found, 0))
        if not delta:
            skip = splat_f32(load_f32(operand(inst, ctx, 5) + 4 * head))
            o = fma(skip, load_f32x16(value), o)
        store_first(out, o, n)
        if VECTORS == 2:
            if n > 16:
                o = fma(both, vector_of(addend, 1), decay * vector_of(found, 1))
                if not delta:
                    skip = splat_f32(load_f32(operand(inst, ctx, 5) + 4 * head))
                    o = fma(skip, load_f32x16(value + 64), o)
                store_first(out + 64, o, n - 16)

    @inline
    def row_of(inst, ctx, journal, begin, base, i):
        """Journaled columns of the sequence's token i of the pass, or if i < 0 of one before."""
        if i < 0:
            size = 4 * (round_up_16(parameter(inst, RULE.columns)) + round_up_16(parameter(inst, RULE.gate_columns)))
            return journal + ((base + i) & (JOURNAL_TOKENS - 1)) * size
        return operand(inst, ctx, 0) + (begin + i) * parameter(inst, RULE.x_stride) + 4 * parameter(inst, RULE.first)

    @inline
    def gates_of(inst, ctx, head, row, begin, i, tokens, scratch):
        """Prepare the gates of token i, where they are not yet there; gives the place of its decay in scratch."""
        if i < 0:
            prepare(inst, ctx, head, row + 4 * round_up_16(parameter(inst, RULE.columns)), 0, 1, scratch)
            return scratch
        if i & (JOURNAL_TOKENS - 1) == 0:
            n, stride = min(JOURNAL_TOKENS, tokens - i), parameter(inst, RULE.gates_stride)
            raw = operand(inst, ctx, 1) + (begin + i) * stride + 4 * parameter(inst, RULE.gate_start)
            prepare(inst, ctx, head, raw, stride, n, scratch)
            at = div_i64(head, parameter(inst, RULE.group)) * parameter(inst, RULE.key_dim)
            key = row + 4 * (parameter(inst, RULE.keys) + at)
            query = row + 4 * (parameter(inst, RULE.queries) - parameter(inst, RULE.first) + at)
            for j in range(n):
                both = dot(key, query, parameter(inst, RULE.key_dim))
                store_f32(scratch + 2 * _GATES + 4 * j, both)
                key, query = key + parameter(inst, RULE.x_stride), query + parameter(inst, RULE.x_stride)
        return scratch + 4 * (i & (JOURNAL_TOKENS - 1))

    @inline
    def advance(inst, ctx, head, tile, journal, column, n, begin, tokens, base, stamp, stored, scratch):
        """n columns of a tile: tokens from the journal, then those of the pass, of which some are stored."""
        rows, at = parameter(inst, RULE.key_dim), div_i64(head, parameter(inst, RULE.group))
        keys, values = 4 * (parameter(inst, RULE.keys) + at * rows), 4 * (parameter(inst, RULE.values) + column)
        queries = 4 * (parameter(inst, RULE.queries) - parameter(inst, RULE.first) + at * rows)
        source, row = tile, row_of(inst, ctx, journal, begin, base, stamp - base)
        asked = keys if stamp < base else queries
        found = zero_tile(READ)
        if delta or stamp == base:
            found = read(tile, row + asked, keys - asked, rows)
        for i in range(stamp - base, tokens):
            gates = gates_of(inst, ctx, head, row, begin, i, tokens, scratch)
            decay, gate = splat_f32(load_f32(gates)), splat_f32(load_f32(gates + _GATES))
            addend = addends(found, row + values, decay, gate, n)
            if i >= 0:
                out = operand(inst, ctx, 2) + (begin + i) * parameter(inst, RULE.out_stride) + 4 * column
                both = splat_f32(load_f32(gates + 2 * _GATES))
                give(inst, ctx, head, out, found, addend, row + values, decay, both, n)
            target = tile if i < stored else scratch + 3 * _GATES
            key, row = row + keys, row_of(inst, ctx, journal, begin, base, i + 1)
            asked = keys if i + 1 < 0 else queries
            if i + 1 < tokens:
                found = change_and_read(source, target, addend, key, decay, row + asked, keys - asked, rows)
            elif i < stored:
                change(source, target, addend, key, decay, rows)
            source = target

    @inline
    def one_tile(inst, ctx, tid, head, slot, tile, part, begin, tokens, base):
        """A tile of a head, as many columns at once as registers hold."""
        rows, size = parameter(inst, RULE.key_dim), parameter(inst, RULE.value_dim)
        at, stamps = slot + tile * rows * _ROW, slot + parameter(inst, RULE.stamps) + 8 * tile
        journal, scratch = slot + parameter(inst, RULE.journal), operand(inst, ctx, 7)
        scratch += tid * parameter(inst, RULE.scratch)
        stamp, stored = load_i64(stamps), 0
        if base == 0:
            stamp = 0
            for i in range(0, rows * _ROW, 64):
                store_f32x16(at + i, splat_f32(0.0))
        if tokens > JOURNAL_TOKENS:
            stored = ((base + tokens) & -JOURNAL_TOKENS) - base
        first = part * STATE_TILE_COLUMNS
        for column in range(first, min(size, first + STATE_TILE_COLUMNS), 16 * VECTORS):
            n = min(16 * VECTORS, size - column)
            advance(inst, ctx, head, at + 4 * (column - first), journal, head * size + column, n, begin, tokens,
                    base, stamp, stored, scratch)
        store_i64(stamps, base + stored)

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
                one_tile(inst, ctx, tid, head, slot, head * tiles + part, part, begin, tokens, base)
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
