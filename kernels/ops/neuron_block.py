"""One token: a block of neurons from gate to column."""

from __future__ import annotations

from ..abi import NEURON_BATCH
from ..parameters import ACTIVATIONS, NEURON_GATED
from ..vector.record import inline, outlined, parameter
from ..vector.simd import div_i64, load_f32, load_i64, store_f32, store_i64
from .neuron_batch import FOUND, LIVE, VALUES, Batch, alive, gates, upcoming, ups
from .neuron_ffn import fetch
from .neuron_parts import Columns, multiply, zero

RELU, RELU2 = ACTIVATIONS["relu"], ACTIVATIONS["relu2"]


@inline
def most_live(ffn):
    """Tell whether nearly all neurons that are computed live: the activation is hardly ever 0, or a list names them."""
    kind = parameter(ffn.rec, NEURON_GATED.activation)
    return (kind != RELU and kind != RELU2) or ffn.listed != 0


@inline
def fetch_upcoming(ffn, batch, first, stop):
    """Ask for parts first .. stop of the batch that follows."""
    for call in range(first, stop):
        fetch(upcoming(ffn, batch, call), ffn.part)


@outlined
def add_columns(form, ffn, areas, batch, sums, waiting):
    """Add the columns of waiting neurons to the block's sums; the last third of the next batch is fetched."""
    columns = Columns(areas.scratch + FOUND, areas.scratch + VALUES, waiting, areas.factors, areas.size)
    multiply(ffn, columns, 1, 0, ffn.lines)
    step, at, call = (div_i64(NEURON_BATCH * ffn.part, ffn.lines) + 63) & -64, 0, 2 * NEURON_BATCH
    for line in range(ffn.lines):
        if batch.eager:
            fetch(upcoming(ffn, batch, call) + at, step)
            at += step
            if at >= ffn.part:
                at, call = 0, call + 1
        form.add(ffn, columns, line, columns.factors + 16 * line, sums + 4 * form.columns * line, 0)


@inline
def shift(scratch, waiting):
    """Forget the first batch of those that wait."""
    for k in range(NEURON_BATCH, waiting):
        before = k - NEURON_BATCH
        store_i64(scratch + LIVE + 8 * before, load_i64(scratch + LIVE + 8 * k))
        store_i64(scratch + FOUND + 8 * before, load_i64(scratch + FOUND + 8 * k))
        store_f32(scratch + VALUES + 4 * before, load_f32(scratch + VALUES + 4 * k))
    return max(waiting - NEURON_BATCH, 0)


@outlined
def block(form, ffn, areas, token, sums, whole):
    """Put f of the entries `whole` and the sum of their columns; return whether the next block begins eagerly."""
    scratch, first, eager, waiting = areas.scratch, whole.first, whole.eager, 0
    zero(sums, 4 * form.columns * ffn.lines)
    while first < whole.stop:
        batch = Batch(first, min(first + NEURON_BATCH, whole.stop), whole.last, eager)
        if eager:  # a short batch has fewer rows to fetch in
            fetch_upcoming(ffn, batch, batch.stop - first, NEURON_BATCH)
        gates(form, ffn, areas, batch)
        before = waiting
        waiting = alive(form, ffn, scratch, token, batch, waiting)
        if not eager:
            for k in range(before, waiting):
                fetch(load_i64(scratch + FOUND + 8 * k) - ffn.part, 2 * ffn.part)
        first, live = batch.stop, waiting - before
        while waiting >= NEURON_BATCH or (first >= whole.stop and waiting > 0):
            now = min(waiting, NEURON_BATCH)
            if eager:
                fetch_upcoming(ffn, batch, NEURON_BATCH + now, 2 * NEURON_BATCH)
            ups(form, ffn, areas, token, batch, now)
            add_columns(form, ffn, areas, batch, sums, now)
            waiting = shift(scratch, waiting)
        eager = most_live(ffn) or 2 * live > NEURON_BATCH
    return eager
