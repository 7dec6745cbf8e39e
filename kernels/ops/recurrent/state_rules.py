"""Delta rule and selective scan: a matrix for each head, which a sequence's tokens change one after the other.

A unit of work is a head of one sequence: its tiles of 32 columns one by one, each with a block of tokens, so a tile
stays in the first cache. A token costs one pass over the tile, which changes S and multiplies it by the next token's
key and query: with S' = decay S + k d^T the token's own output S'^T q is decay S^T q + (k . q) d, which a delta rule's
d = beta (v - decay S^T k) is known for before S changes. Where each row has a decay of its own, S is multiplied by the
products of key and query with the decays instead. abi/state.py documents the state and its journal.

Operands: 0 x, 1 gates, 2 out, 3 a, 4 dt_bias, 5 d, 6 state, 7 scratch. Parameters: parameters.RULE.
Reference: reference/recurrent/state_rules.py.
"""

from __future__ import annotations

from ...abi import (
    COUNT_SEQUENCES,
    CTX_SEQUENCES,
    GATE_TOKENS,
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
from ...vector.instruction import claim, count, inline, operand, parameter, round_up_16, token
from ...vector.lanes import keep_first, splat_f32
from ...vector.memory import load_f32, load_f32x16, load_i64, store_f32x16, store_first, store_i64
from ...vector.scalars import div_i64
from ...vector.state_rows import add_read, add_tiles, changed_row, load_tile, vector_of, with_vector
from ...vector.targets import fma, state_vectors
from ...vector.tiles import store_tile, zero_tile
from .decays import held, oldest, one_decay, row_decays
from .gates import GATE_ROW, gates_of

_ROW = 4 * STATE_TILE_COLUMNS
BLOCK = GATE_TOKENS - JOURNAL_TOKENS
"""Tokens that go through all tiles of a head before the next ones do."""
VECTORS = state_vectors()
"""Vectors of a row that are in work at once: one or two."""
LAST = VECTORS - 1


def _rule(delta, by_row=False):
    """Return the kernel of the delta rule, or of the selective scan; `by_row`: each row of the state decays by itself.
    """
    READ = VECTORS * (1 + delta)
    LAST_READ = READ - 1
    gates = gates_of(delta, by_row)
    decay_of, of_row, decayed, asked = row_decays() if by_row else one_decay()

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
            store_tile(changed_row(addend, source + at, key + 4 * r, of_row(decay, r)), target + at, 64)

    @inline
    def change_and_read(source, target, addend, key, decay, query, apart, rows):
        """`change`, then `read`, in one pass over the tile."""
        a, b = zero_tile(READ), zero_tile(READ)
        for r in range(0, rows - 1, 2):
            at = _ROW * r
            changed = changed_row(addend, source + at, key + 4 * r, of_row(decay, r))
            store_tile(changed, target + at, 64)
            a = add_read(a, changed, query + 4 * r, apart)
            changed = changed_row(addend, source + at + _ROW, key + 4 * r + 4, of_row(decay, r + 1))
            store_tile(changed, target + at + _ROW, 64)
            b = add_read(b, changed, query + 4 * r + 4, apart)
        if rows & 1:
            r, at = rows - 1, _ROW * (rows - 1)
            changed = changed_row(addend, source + at, key + 4 * r, of_row(decay, r))
            store_tile(changed, target + at, 64)
            a = add_read(a, changed, query + 4 * r, apart)
        return add_tiles(a, b)

    @inline
    def addends(found, value, decay, gate, n):
        """d: beta (v - decay S^T k), or time x value; 0 after n columns."""
        v = keep_first(load_f32x16(value), n)
        if delta:
            v = v - decayed(decay, vector_of(found, VECTORS))
        out = with_vector(zero_tile(VECTORS), 0, gate * v)
        if n > 16:
            v = keep_first(load_f32x16(value + 64), n - 16)
            if delta:
                v = v - decayed(decay, vector_of(found, LAST_READ))
            out = with_vector(out, LAST, gate * v)
        return out

    @inline
    def give(inst, ctx, head, out, found, addend, value, decay, both, n):
        """Store decay S^T q + (k . q) d, the result of the changed state; a scan adds its skip."""
        o = fma(both, vector_of(addend, 0), decayed(decay, vector_of(found, 0)))
        if not delta:
            skip = splat_f32(load_f32(operand(inst, ctx, 5) + 4 * head))
            o = fma(skip, load_f32x16(value), o)
        store_first(out, o, n)
        if n > 16:
            o = fma(both, vector_of(addend, LAST), decayed(decay, vector_of(found, LAST)))
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
    def advance(inst, ctx, head, tile, journal, column, n, begin, tokens, base, stamp, stored, gates):
        """n columns of a tile: tokens from the journal, then those of the block, of which some are stored."""
        rows, at = parameter(inst, RULE.key_dim), div_i64(head, parameter(inst, RULE.group))
        keys, values = 4 * (parameter(inst, RULE.keys) + at * rows), 4 * (parameter(inst, RULE.values) + column)
        queries = 4 * (parameter(inst, RULE.queries) - parameter(inst, RULE.first) + at * rows)
        source, row = tile, row_of(inst, ctx, journal, begin, base, stamp - base)
        found = zero_tile(READ)
        if delta or stamp == base:
            query, apart = asked(inst, gates, row, keys, queries, stamp - base, base)
            found = read(tile, query, apart, rows)
        for i in range(stamp - base, tokens):
            own = gates + 4 * held(i, base)
            decay, gate = decay_of(inst, gates, held(i, base)), splat_f32(load_f32(own + GATE_ROW))
            addend = addends(found, row + values, decay, gate, n)
            if i >= 0:
                out = operand(inst, ctx, 2) + (begin + i) * parameter(inst, RULE.out_stride) + 4 * column
                both = splat_f32(load_f32(own + 2 * GATE_ROW))
                give(inst, ctx, head, out, found, addend, row + values, decay, both, n)
            target = tile if i < stored else gates + 3 * GATE_ROW
            key, row = row + keys, row_of(inst, ctx, journal, begin, base, i + 1)
            if i + 1 < tokens:
                query, apart = asked(inst, gates, row, keys, queries, i + 1, base)
                found = change_and_read(source, target, addend, key, decay, query, apart, rows)
            elif i < stored:
                change(source, target, addend, key, decay, rows)
            source = target

    @inline
    def one_tile(inst, ctx, head, slot, part, begin, tokens, base, stored, gates):
        """A tile of a head, as many columns at once as registers hold."""
        rows, size = parameter(inst, RULE.key_dim), parameter(inst, RULE.value_dim)
        tile = head * div_i64(size + STATE_TILE_COLUMNS - 1, STATE_TILE_COLUMNS) + part
        at, stamps = slot + tile * rows * _ROW, slot + parameter(inst, RULE.stamps) + 8 * tile
        stamp = load_i64(stamps)
        if base == 0:
            stamp = 0
            for i in range(0, rows * _ROW, 64):
                store_f32x16(at + i, splat_f32(0.0))
        first = part * STATE_TILE_COLUMNS
        for column in range(first, min(size, first + STATE_TILE_COLUMNS), 16 * VECTORS):
            advance(inst, ctx, head, at + 4 * (column - first), slot + parameter(inst, RULE.journal),
                    head * size + column, min(16 * VECTORS, size - column), begin, tokens, base, stamp, stored, gates)
        store_i64(stamps, base + stored)

    @inline
    def one_head(inst, ctx, tid, head, slot, begin, tokens, base):
        """A head of one sequence, in blocks of tokens; those that are not stored are in the last one."""
        tiles = div_i64(parameter(inst, RULE.value_dim) + STATE_TILE_COLUMNS - 1, STATE_TILE_COLUMNS)
        scratch, done, stored = operand(inst, ctx, 7) + tid * parameter(inst, RULE.scratch), 0, 0
        if tokens > JOURNAL_TOKENS:
            stored = ((base + tokens) & -JOURNAL_TOKENS) - base
        while done < tokens:
            n, journal, least = min(BLOCK, tokens - done), 0, 0
            if done + n < tokens:
                n = min(n, stored - done)
            if done == 0 and base > 0:
                journal = slot + parameter(inst, RULE.journal)
                if by_row:
                    least = oldest(inst, head, tiles, slot)
            gates(inst, ctx, head, journal, least, begin + done, n, base, scratch)
            for part in range(tiles):
                one_tile(inst, ctx, head, slot, part, begin + done, n, base + done, min(n, stored - done), scratch)
            done += n

    def state_rule(inst, ctx, tid, n_threads):
        heads = parameter(inst, RULE.heads)
        units = count(ctx, COUNT_SEQUENCES) * heads
        unit = claim(ctx)
        while unit < units:
            number = div_i64(unit, heads)
            head = unit - number * heads
            entry = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * number
            begin, tokens = load_i64(entry + SEQUENCE_FIRST), load_i64(entry + SEQUENCE_TOKENS)
            slot = operand(inst, ctx, 6) + load_i64(entry + SEQUENCE_SLOT)
            one_head(inst, ctx, tid, head, slot, begin, tokens, token(ctx, begin, TOKEN_BASE))
            unit = claim(ctx)
        return 0

    return state_rule


kernel("delta_rule")(_rule(1))
kernel("delta_rule_rows")(_rule(1, by_row=True))
kernel("selective_scan")(_rule(0))


@kernel("state_journal")
def state_journal(inst, ctx, tid, n_threads):
    """Copy the values from which the last tokens of each sequence can be replayed into its journal."""
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
