"""Steps on chosen neurons: gates and which of them are alive, then ups of these, in batches of NEURON_BATCH."""

from __future__ import annotations

from typing import NamedTuple

from ...abi import FLAG_DENSE, NEURON_BATCH, NEURON_CLAIM, NEURON_TOKENS
from ...parameters import ACTIVATIONS, NEURON_GATED
from ...vector.instruction import flags, float_parameter, inline, outlined, parameter
from ...vector.lanes import sum_lanes
from ...vector.memory import load_f32, load_f32x16, load_i32, load_i64, store_f32, store_f32x16, store_i32, store_i64
from ...vector.scalars import abs_f32, f32_from_bits, max_f32
from ...vector.vecmath import activate
from .ffn import THRESHOLDS, chosen, column_at, fetch_pair, for_column, row_at

DRELU = ACTIVATIONS["drelu"]
# A thread's scratch: sums of rows, gates of a batch (16 floats a token), addresses of masks; then of the chosen neurons
# of a claim their numbers, of the live ones addresses of columns and values for all tokens; then arrays
# whose size depends on the number of lines.
GATES = 64 * NEURON_TOKENS
MASKS = 2 * GATES
NUMBERS = MASKS + 64  # after the addresses of masks the thresholds
FOUND = NUMBERS + 4 * NEURON_CLAIM
VALUES = FOUND + 8 * NEURON_CLAIM
AREAS = VALUES + 4 * NEURON_CLAIM * NEURON_TOKENS
ROWS_AHEAD = 2
"""Gate rows between the one in work and the one that is fetched, where gates are a stream."""


class Areas(NamedTuple):
    """Addresses in a thread's scratch."""

    scratch: int
    """Address of the scratch; see above."""
    x: int
    """The tokens' activations as lines."""
    factors: int
    """Factors of a batch's columns."""
    size: int
    """Bytes of a column's factors."""
    own: int
    """A fused input row."""


class Window(NamedTuple):
    """Chosen neurons first .. stop of a list of `n`, all of which this thread computes."""

    numbers: int
    """Address of the list; the numbers of live neurons replace those of `first` and on."""
    first: int
    stop: int
    n: int
    eager: bool
    """True if most of them will live: it is one batch, and pairs of the next batch are fetched before their gates are
    known."""


@inline
def areas_of(scratch, lines, x_bytes):
    """Divide a thread's scratch."""
    x, size = scratch + AREAS, 16 * ((lines + 3) & -4)
    factors = x + NEURON_TOKENS * lines * x_bytes
    return Areas(scratch, x, factors, size, factors + NEURON_BATCH * size)


@inline
def gate_at(ffn, window, k):
    """Return the address of a chosen neuron's gate row; after the list's end it is the last one's."""
    return row_at(ffn, load_i32(window.numbers + 4 * min(k, window.n - 1)))


@inline
def upcoming(ffn, areas, window, live, part):
    """Return the address of a part of the live neurons, up, column, up, ... in one stream, then of the next memory."""
    before = ffn.up & ~part  # 1 of an up row: it is a part before the column
    if part < live << ffn.up:
        return load_i64(areas.scratch + FOUND + 8 * (part >> ffn.up)) - ffn.part * before
    part -= live << ffn.up
    if window.eager:
        neuron = load_i32(window.numbers + 4 * min(window.stop + (part >> ffn.up), window.n - 1))
        return column_at(ffn, neuron) - ffn.part * before
    return gate_at(ffn, window, window.stop + part)


@outlined
def activate_gates(gates, tokens, kind, limit):
    """Apply the hidden activation to the gates of a batch."""
    for at in range(gates, gates + 64 * tokens, 64):
        store_f32x16(at, activate(load_f32x16(at), kind, limit))


@outlined
def gates(form, ffn, areas, window, first, stop):
    """Put the activated gates of chosen neurons first .. stop into scratch, while rows ahead are fetched."""
    at, ahead = areas.scratch + GATES, NEURON_BATCH if window.eager else ROWS_AHEAD
    for k in range(first, stop):
        neuron = load_i32(window.numbers + 4 * k)
        form.row_sums(ffn, row_at(ffn, neuron), areas.x, gate_at(ffn, window, k + ahead), areas.scratch)
        for t in range(form.n):
            gate = sum_lanes(load_f32x16(areas.scratch + 64 * t))
            if ffn.bias:
                gate += load_f32(ffn.bias + 4 * neuron)
            store_f32(at + 4 * (16 * t + k - first), gate)
    activate_gates(at, form.n, parameter(ffn.inst, NEURON_GATED.activation),
                   float_parameter(ffn.inst, NEURON_GATED.limit))


@outlined
def alive(form, ffn, scratch, tokens, window, first, stop, live):
    """Append the live ones of the neurons first .. stop, whose gates are there, to `live` others; return how many.

    A neuron lives if one of the tokens that have chosen it has a gate that is not 0, or if all are to be computed.
    """
    for k in range(first, stop):
        neuron, any_token = load_i32(window.numbers + 4 * k), flags(ffn.inst) & FLAG_DENSE
        for j in range(tokens.present):
            value = load_f32(scratch + GATES + 4 * (16 * j + k - first))
            if not chosen(tokens, j, neuron) or abs_f32(value) <= load_f32(tokens.masks + THRESHOLDS + 4 * j):
                value = f32_from_bits(0)
            any_token |= value != 0
            store_f32(scratch + VALUES + 4 * (form.n * live + j), value)
        store_i32(window.numbers + 4 * (window.first + live), neuron)
        store_i64(scratch + FOUND + 8 * live, column_at(ffn, neuron))
        live += any_token != 0
    return live


@inline
def all_alive(form, ffn, areas, tokens, window):
    """Compute the gates of a window and find its live neurons; the pairs of a first batch of them are fetched."""
    live = 0
    for first in range(window.first, window.stop, NEURON_BATCH):
        stop = min(first + NEURON_BATCH, window.stop)
        gates(form, ffn, areas, window, first, stop)
        before, live = live, alive(form, ffn, areas.scratch, tokens, window, first, stop, live)
        for k in range(before, 0 if window.eager else min(live, NEURON_BATCH)):
            fetch_pair(ffn, load_i64(areas.scratch + FOUND + 8 * k))
    return live


@outlined
def ups(form, ffn, areas, tokens, window, first, stop, live):
    """Put the values of live neurons first .. stop, gates times ups, into f and scratch.

    Half of the batch that follows, of `live` neurons in all, is fetched. Without ups the gates are the values. Those in
    scratch are for columns (`for_column`).
    """
    scratch = areas.scratch
    for k in range(first, stop):
        neuron = load_i32(window.numbers + 4 * (window.first + k))
        if ffn.up == 0:
            for j in range(tokens.present):
                at = scratch + VALUES + 4 * (form.n * k + j)
                value = load_f32(at)
                store_f32(tokens.f + j * tokens.stride + 4 * neuron, value)
                store_f32(at, for_column(ffn, neuron, value))
            continue
        ahead = upcoming(ffn, areas, window, live, 2 * stop + k - first)
        form.row_sums(ffn, column_at(ffn, neuron) - ffn.part, areas.x, ahead, scratch)
        for j in range(tokens.present):
            at = scratch + VALUES + 4 * (form.n * k + j)
            value = load_f32(at)
            if value != 0:
                up = sum_lanes(load_f32x16(scratch + 64 * j))
                if ffn.bias:
                    up += load_f32(ffn.bias + 4 * (ffn.neurons + neuron))
                if parameter(ffn.inst, NEURON_GATED.activation) == DRELU:
                    up = max_f32(up, f32_from_bits(0))
                store_f32(at, for_column(ffn, neuron, value * up))
                store_f32(tokens.f + j * tokens.stride + 4 * neuron, value * up)


@inline
def clear(tokens, first, stop):
    """Store zeros in f of the neurons first .. stop."""
    for j in range(tokens.present):
        for neuron in range(first, stop):
            store_f32(tokens.f + j * tokens.stride + 4 * neuron, f32_from_bits(0))
