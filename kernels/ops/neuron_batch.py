"""Steps on a batch of at most NEURON_BATCH neurons: gates, which of them are alive, ups."""

from __future__ import annotations

from typing import NamedTuple

from ..abi import NEURON_BATCH, NEURON_TOKENS
from ..parameters import NEURON_GATED
from ..vector.record import inline, outlined, parameter
from ..vector.simd import f32_from_bits, load_f32, load_f32x16, load_i64, store_f32, store_f32x16, store_i64, sum_lanes
from ..vector.vecmath import activate
from .neuron_ffn import number, part_at

# A thread's scratch: sums of rows, gates of a batch (16 floats a token), then of up to 16 live neurons their entries,
# addresses of their columns, their values for all tokens; then what the number of lines gives the size of.
GATES = 64 * NEURON_TOKENS
LIVE = 2 * GATES
FOUND = LIVE + 16 * NEURON_BATCH
VALUES = FOUND + 16 * NEURON_BATCH
AREAS = VALUES + 8 * NEURON_BATCH * NEURON_TOKENS


class Areas(NamedTuple):
    """Addresses in a thread's scratch."""

    scratch: int
    """Its beginning; see above."""
    x: int
    """The tokens' activations as lines."""
    row: int
    """Scales of a row."""
    factors: int
    """Factors of a batch's columns."""
    size: int
    """Bytes of a row's scales and of a column's factors."""
    own: int
    """A fused input row."""


class Batch(NamedTuple):
    """Entries first .. stop; those up to `last` come next."""

    first: int
    stop: int
    last: int
    eager: bool
    """Whether all parts of what comes next are fetched, not its gates alone."""


@inline
def areas_of(scratch, lines, x_bytes):
    """Divide a thread's scratch."""
    x, size = scratch + AREAS, 16 * ((lines + 3) & -4)
    row = x + NEURON_TOKENS * lines * x_bytes
    return Areas(scratch, x, row, row + size, size, row + (NEURON_BATCH + 1) * size)


@inline
def upcoming(ffn, batch, call):
    """Return the address of part `call` of the batch that follows: gate, up, column, gate, ... in one stream."""
    return part_at(ffn, min(batch.stop + call // 3, batch.last), call % 3)


@outlined
def activate_gates(gates, tokens, kind):
    """Apply the hidden activation to the gates of a batch."""
    for at in range(gates, gates + 64 * tokens, 64):
        store_f32x16(at, activate(load_f32x16(at), kind))


@outlined
def gates(form, ffn, areas, batch):
    """Put activated gates into scratch. What follows is fetched: a third of the next batch, or its gates alone."""
    at = areas.scratch + GATES
    for entry in range(batch.first, batch.stop):
        ahead = part_at(ffn, min(entry + 2, batch.last), 0)
        if batch.eager:
            ahead = upcoming(ffn, batch, entry - batch.first)
        form.row_sums(ffn, part_at(ffn, entry, 0), areas.x, ahead, areas.row, areas.scratch)
        for t in range(form.n):
            gate = sum_lanes(load_f32x16(areas.scratch + 64 * t))
            if ffn.bias:
                gate += load_f32(ffn.bias + 4 * number(ffn, entry))
            store_f32(at + 4 * (16 * t + entry - batch.first), gate)
    activate_gates(at, form.n, parameter(ffn.rec, NEURON_GATED.activation))


@outlined
def alive(form, ffn, scratch, tokens, batch, waiting):
    """Append live neurons to those that wait, store the zeros of dead ones; return how many wait now."""
    for entry in range(batch.first, batch.stop):
        live = 0
        for j in range(tokens.present):
            value = load_f32(scratch + GATES + 4 * (16 * j + entry - batch.first))
            live |= value != 0
            store_f32(scratch + VALUES + 4 * (form.n * waiting + j), value)
            store_f32(tokens.f + j * tokens.stride + 4 * entry, f32_from_bits(0))
        store_i64(scratch + LIVE + 8 * waiting, entry)
        store_i64(scratch + FOUND + 8 * waiting, part_at(ffn, entry, 2))
        waiting += live
    return waiting


@outlined
def ups(form, ffn, areas, tokens, batch, waiting):
    """Put the values of waiting neurons, gates times ups, into f and scratch."""
    scratch = areas.scratch
    for k in range(waiting):
        entry, row = load_i64(scratch + LIVE + 8 * k), load_i64(scratch + FOUND + 8 * k) - ffn.part
        ahead = row
        if batch.eager:
            ahead = upcoming(ffn, batch, NEURON_BATCH + k)
        form.row_sums(ffn, row, areas.x, ahead, areas.row, scratch)
        for j in range(tokens.present):
            at = scratch + VALUES + 4 * (form.n * k + j)
            value = load_f32(at)
            if value != 0:
                up = sum_lanes(load_f32x16(scratch + 64 * j))
                if ffn.bias:
                    up += load_f32(ffn.bias + 4 * (ffn.neurons + number(ffn, entry)))
                store_f32(at, value * up)
                store_f32(tokens.f + j * tokens.stride + 4 * entry, value * up)
