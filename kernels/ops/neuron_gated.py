"""An FFN stored neuron by neuron (layout neuron): f = act(x G^T) * (x U^T), then f D^T.

Only live neurons cost memory traffic: up rows and down columns are read where the gate's activation is not exactly 0.
With a list (FLAG_LIST) only its neurons are computed, and f is in the list's order.

One token (`neuron_block.py`): `neuron_gated_*` goes through blocks of neurons and computes each from gate to column
while its bytes stream in; a block leaves f and the sum of its columns, and `neuron_down_*` (`neuron_down.py`) adds up
these sums. More tokens: `neuron_gated_*` computes f, `neuron_down_*` the sums, split by outputs among threads. Both
ways go in batches (`neuron_batch.py`): gates, which of them are alive, ups of these. `neuron_ffn.py` says where
neurons lie, `neuron_parts.py` multiplies a row with tokens and adds a column up.

A row's sum is 16 lanes that grow line by line. An output is summed neuron by neuron within fixed blocks of neurons,
then block by block, and adding 0 changes nothing. So no bit depends on the number of tokens, on threads or on what was
skipped.

Operands of `neuron_gated_*`: 0 weights, 1 x, 2 f, 3 list, 4 scratch, 5 bias (gates', then ups'), 6 sums of blocks,
7 source and 8 norm weight of a fused input. Parameters: parameters.NEURON_GATED. Twin: reference/neuron.py.
"""

from __future__ import annotations

from ..abi import COUNT_SEVERAL, NEURON_BATCH
from ..parameters import NEURON_GATED
from ..registry import kernel
from ..vector.record import claim, count, float_parameter, inline, operand, parameter
from ..vector.simd import div_i64
from .elementwise import fused_input
from .neuron_batch import Batch, alive, areas_of, gates, ups
from .neuron_block import block, most_live
from .neuron_ffn import Tokens, fetch, first_entry, open_ffn, part_at
from .neuron_parts import TOKENS, make_form, q8_block

MANY_CHUNKS = 16
"""Chunks that are claimed together where there are many tokens, because x is laid out as lines once a claim."""


@inline
def input_row(rec, ctx, own):
    """Return the address of one token's x: a quantised row, or what this thread makes of the source at `own`."""
    fused = parameter(rec, NEURON_GATED.fused)
    if fused and count(ctx, COUNT_SEVERAL) == 0:
        return fused_input(
            operand(rec, ctx, 7), operand(rec, ctx, 8), fused, parameter(rec, NEURON_GATED.width),
            parameter(rec, NEURON_GATED.group), parameter(rec, NEURON_GATED.x_scales),
            parameter(rec, NEURON_GATED.x_offsets), float_parameter(rec, NEURON_GATED.eps),
            own + parameter(rec, NEURON_GATED.x_stride), own)
    return operand(rec, ctx, 1)


@inline
def single(form, ffn, areas, ctx, f, n_threads):
    """Compute all blocks of neurons for one token."""
    form.as_lines(ffn, input_row(ffn.rec, ctx, areas.own), 0, 1, areas.x, form.x_bytes)
    height, sums_bytes = parameter(ffn.rec, NEURON_GATED.block), 4 * form.columns * ffn.lines
    span = 1  # blocks of a list are short: more of them are claimed at once
    if ffn.listed:
        span = max(1, div_i64(ffn.neurons, 4 * n_threads * height))
    at = claim(ctx) * span
    while at * height < ffn.neurons:
        eager = most_live(ffn)
        start = first_entry(ffn, at * height)
        last = first_entry(ffn, (at + span) * height) - 1
        for entry in range(start, min(start + (NEURON_BATCH if eager else 2), last + 1)):
            fetch(part_at(ffn, entry, 0), 3 * ffn.part if eager else ffn.part)
        for _ in range(span):
            if at * height < ffn.neurons:
                sums = operand(ffn.rec, ctx, 6) + sums_bytes * at
                at += 1
                end = first_entry(ffn, at * height)
                eager = block(form, ffn, areas, Tokens(1, f, 0), sums, Batch(start, end, last, eager))
                start = end
        at = claim(ctx) * span


@inline
def several(form, ffn, areas, ctx, f, tokens, n_threads):
    """Compute f of more tokens, TOKENS at a time."""
    chunk, stride = parameter(ffn.rec, NEURON_GATED.chunk), parameter(ffn.rec, NEURON_GATED.out_stride)
    chunk = max(chunk, min(MANY_CHUNKS * chunk, div_i64(ffn.entries, n_threads) + 1))
    x, start = operand(ffn.rec, ctx, 1), claim(ctx) * chunk
    while start < ffn.entries:
        end = min(start + chunk, ffn.entries)
        for t in range(0, tokens, TOKENS):
            some, first = Tokens(min(TOKENS, tokens - t), f + t * stride, stride), start
            for j in range(some.present):
                q8, at, height = q8_block(x, parameter(ffn.rec, NEURON_GATED.x_stride), t + j, tokens)
                form.as_lines(ffn, q8, at, height, areas.x + j * form.x_bytes, TOKENS * form.x_bytes)
            while first < end:
                batch = Batch(first, min(first + NEURON_BATCH, end), end - 1, False)
                gates(form, ffn, areas, batch)
                ups(form, ffn, areas, some, batch, alive(form, ffn, areas.scratch, some, batch, 0))
                first = batch.stop
        start = claim(ctx) * chunk


def _register(dtype):
    one, many = make_form(dtype, 1), make_form(dtype, TOKENS)

    @kernel(f"neuron_gated_{dtype}")
    def run(rec, ctx, tid, n_threads):
        ffn, f = open_ffn(rec, ctx, NEURON_GATED, one.bits), operand(rec, ctx, 2)
        scratch = operand(rec, ctx, 4) + tid * parameter(rec, NEURON_GATED.scratch)
        areas = areas_of(scratch, ffn.lines, one.x_bytes)
        tokens = count(ctx, parameter(rec, NEURON_GATED.rows))
        if tokens == 1:
            single(one, ffn, areas, ctx, f, n_threads)
        else:
            several(many, ffn, areas, ctx, f, tokens, n_threads)
        return 0


for _dtype in ("q4", "int8"):
    _register(_dtype)
