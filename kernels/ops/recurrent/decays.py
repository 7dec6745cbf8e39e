"""Decay of a state: as a whole, or of each row by itself."""

from __future__ import annotations

from ...abi import JOURNAL_TOKENS
from ...parameters import RULE
from ...vector.instruction import inline, parameter
from ...vector.lanes import splat_f32
from ...vector.memory import load_f32, load_i64
from ...vector.scalars import div_i64
from .gates import vectors_bytes, vectors_of


@inline
def held(i, base):
    """Place in scratch of token i of a block, or if i < 0 of one of the journal."""
    return JOURNAL_TOKENS + i if i >= 0 else (base + i) & (JOURNAL_TOKENS - 1)


@inline
def oldest(inst, head, tiles, slot):
    """The least position that a tile of a head stands at."""
    stamps = slot + parameter(inst, RULE.stamps) + 8 * head * tiles
    least = load_i64(stamps)
    for part in range(1, tiles):
        least = min(least, load_i64(stamps + 8 * part))
    return least


def one_decay():
    """Return how a state decays as a whole; `row_decays` has the same functions."""

    @inline
    def decay_of(inst, scratch, i):
        """The decay of token i of the scratch."""
        return splat_f32(load_f32(scratch + 4 * i))

    @inline
    def of_row(decay, r):
        """Return the decay of row r."""
        return decay

    @inline
    def decayed(decay, found):
        """Return the result of a decayed state, given that of the state, `found`."""
        return decay * found

    @inline
    def asked(inst, scratch, row, keys, queries, i, base):
        """Address of token i's factors of the state, and the distance from there to the key; query or key first."""
        at = keys if i < 0 else queries
        return row + at, keys - at

    return decay_of, of_row, decayed, asked


def row_decays():
    """Return how each row of a state decays by itself."""

    @inline
    def decay_of(inst, scratch, i):
        return vectors_of(inst, scratch, i)

    @inline
    def of_row(decay, r):
        return decay + 4 * r

    @inline
    def decayed(decay, found):
        return found

    @inline
    def asked(inst, scratch, row, keys, queries, i, base):
        part = div_i64(vectors_bytes(inst), 3)
        return vectors_of(inst, scratch, held(i, base)) + part, part

    return decay_of, of_row, decayed, asked
