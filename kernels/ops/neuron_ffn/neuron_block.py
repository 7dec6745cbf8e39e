"""One token: neurons from gate to column."""

from __future__ import annotations

from ...abi import NEURON_BATCH
from ...parameters import NEURON_GATED
from ...vector.instruction import inline, outlined, parameter
from ...vector.memory import load_i32
from ...vector.scalars import div_i64
from .ffn import fetch
from .neuron_batch import FOUND, VALUES, all_alive, upcoming, ups
from .neuron_parts import Columns, multiply


@outlined
def add_columns(form, ffn, areas, window, sums, first, stop, live, part):
    """Add the columns of live neurons first .. stop to the block's sums; as many parts from `part` on are fetched."""
    columns = Columns(areas.scratch + FOUND + 8 * first, areas.scratch + VALUES + 4 * first, stop - first,
                      areas.factors, areas.size)
    multiply(ffn, columns, 1, 0, ffn.lines)
    step, at = (div_i64(columns.n * ffn.part, ffn.lines) + 63) & -64, 0
    for line in range(ffn.lines):
        fetch(upcoming(ffn, areas, window, live, part) + at, step)
        at += step
        if at >= ffn.part:
            at, part = 0, part + 1
        form.add(ffn, columns, line, columns.factors + 16 * line, sums + 4 * form.columns * line, 0)


@inline
def add_to_blocks(form, ffn, areas, window, sums, first, stop, live):
    """Add the columns of live neurons first .. stop to the sums of their blocks; `sums` are those of block 0."""
    height = parameter(ffn.inst, NEURON_GATED.block)
    part = (stop << ffn.up) + ffn.up * (stop - first)  # half of the next batch was fetched beside its ups
    while first < stop:
        at, end = div_i64(load_i32(window.numbers + 4 * (window.first + first)), height), first + 1
        while end < stop and load_i32(window.numbers + 4 * (window.first + end)) < (at + 1) * height:
            end += 1
        add_columns(form, ffn, areas, window, sums + 4 * form.columns * ffn.lines * at, first, end, live, part)
        first, part = end, part + end - first


@inline
def compute(form, ffn, areas, token, sums, window):
    """Put f of a window's neurons and add up their columns; return how many live."""
    live = all_alive(form, ffn, areas, token, window)
    for first in range(0, live, NEURON_BATCH):
        stop = min(first + NEURON_BATCH, live)
        ups(form, ffn, areas, token, window, first, stop, live)
        add_to_blocks(form, ffn, areas, window, sums, first, stop, live)
    return live
