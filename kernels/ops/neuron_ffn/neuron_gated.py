"""An FFN stored neuron by neuron (layout neuron): f = act(x G^T) * (x U^T), then f D^T.

If neurons have no gate (`ungated`), f = act(x G^T): their one row is where a gate would be, and there are no ups.

Only live neurons cost memory traffic: up rows and down columns are read where the gate's activation is not exactly 0,
unless FLAG_DENSE asks for all. With FLAG_MASK decoded tokens compute the gates of the neurons in their masks alone.

One token (`neuron_block.py`): `neuron_gated_*` goes through blocks of neurons. The gates of a block come as one stream;
then its live neurons are known, and their pairs of up row and down column come one batch ahead of use. A block leaves f
and the sum of its columns, and `neuron_down_*` (`neuron_down.py`) adds up these sums. More tokens: `neuron_gated_*`
computes f, `neuron_down_*` the sums, split by outputs among threads. Both ways share their steps (`neuron_batch.py`):
gates, which of them are alive, ups of these. `ffn.py` says where neurons are and which are chosen, `neuron_parts.py`
multiplies a row with tokens and adds a column up.

A row's sum is 16 lanes that grow line by line. An output is summed neuron by neuron within fixed blocks of neurons,
then block by block, and adding 0 changes nothing. So no bit depends on the number of tokens, on threads, on
skipped neurons, or on the masks of other tokens.

Operands of `neuron_gated_*`: 0 weights, 1 x, 2 f, 3 masks, 4 scratch, 5 bias (gates', then ups'), 6 sums of blocks,
7 source and 8 norm weight of a fused input, 9 slot of each cluster of cold neurons, 10 slots, 11 weight of a norm of
f (`neuron_down.py`). Parameters: parameters.NEURON_GATED. Reference: reference/neuron_ffn/ffn.py.
"""

from __future__ import annotations

from ...abi import COUNT_SEVERAL, NEURON_BATCH, NEURON_CLAIM, NEURON_TYPES
from ...parameters import NEURON_GATED
from ...registry import kernel
from ...vector.instruction import claim, count, float_parameter, inline, operand, parameter
from ...vector.memory import load_i32, load_i64
from ...vector.scalars import div_i64
from ..elementwise import fused_input
from .ffn import Tokens, choose, column_at, fetch, fetch_pair, find_masks, open_ffn, row_at
from .neuron_batch import MASKS, NUMBERS, ROWS_AHEAD, Window, all_alive, areas_of, clear, ups
from .neuron_block import compute
from .neuron_parts import TOKENS, make_form, q8_block, zero

MANY_CHUNKS = 16
"""Chunks that are claimed together if there are many tokens, because x is laid out as lines once a claim."""


@inline
def input_row(inst, ctx, own):
    """Return the address of one token's x: a quantised row, or the row that this thread makes of the source at
    `own`."""
    fused = parameter(inst, NEURON_GATED.fused)
    if fused and count(ctx, COUNT_SEVERAL) == 0:
        return fused_input(
            operand(inst, ctx, 7), operand(inst, ctx, 8), fused, parameter(inst, NEURON_GATED.width),
            parameter(inst, NEURON_GATED.group), parameter(inst, NEURON_GATED.x_scales),
            parameter(inst, NEURON_GATED.x_offsets), float_parameter(inst, NEURON_GATED.eps), 0,
            own + parameter(inst, NEURON_GATED.x_stride), own)
    return operand(inst, ctx, 1)


@inline
def fetch_first(ffn, numbers, n, eager):
    """Ask for the gates, and where most neurons live the pairs, that a claim begins with."""
    for k in range(min(n, NEURON_BATCH if eager else ROWS_AHEAD)):
        neuron = load_i32(numbers + 4 * k)
        fetch(row_at(ffn, neuron), ffn.part)
        if eager:
            fetch_pair(ffn, column_at(ffn, neuron))


@inline
def single(form, ffn, areas, ctx, f, n_threads):
    """Compute all blocks of neurons for one token."""
    form.as_lines(ffn, input_row(ffn.inst, ctx, areas.own), 0, 1, areas.x, form.x_bytes)
    height, row, sums = parameter(ffn.inst, NEURON_GATED.block), 4 * form.columns * ffn.lines, operand(ffn.inst, ctx, 6)
    token, numbers, span = Tokens(1, f, 0, areas.scratch + MASKS), areas.scratch + NUMBERS, 1
    find_masks(ffn.inst, ctx, 0, token)
    masked = load_i64(token.masks) != 0
    if masked:  # few neurons of a block are chosen: more blocks are claimed at once
        span = max(1, min(div_i64(NEURON_CLAIM, height), div_i64(ffn.neurons, 4 * n_threads * height)))
    before, last = div_i64(parameter(ffn.inst, NEURON_GATED.before), height), ffn.neurons - parameter(
        ffn.inst, NEURON_GATED.behind)
    at, eager = before + claim(ctx) * span, masked
    while at * height < last:
        end = min((at + span) * height, last)
        n, first, live = choose(token, at * height, end, numbers), 0, 0
        clear(token, at * height, end)
        zero(sums + row * at, row * div_i64(end - at * height + height - 1, height))
        fetch_first(ffn, numbers, n, eager)
        while first < n:
            stop = min(first + NEURON_BATCH, n) if eager else n
            live += compute(form, ffn, areas, token, sums, Window(numbers, first, stop, n, eager))
            first = stop
        eager = masked and 2 * live >= n
        at = before + claim(ctx) * span


@inline
def several(form, ffn, areas, ctx, f, tokens, n_threads):
    """Compute f of more tokens, TOKENS at a time."""
    chunk, stride = parameter(ffn.inst, NEURON_GATED.chunk), parameter(ffn.inst, NEURON_GATED.out_stride)
    chunk = min(NEURON_CLAIM, max(chunk, min(MANY_CHUNKS * chunk, div_i64(ffn.neurons, n_threads) + 1)))
    x, numbers, before = operand(ffn.inst, ctx, 1), areas.scratch + NUMBERS, parameter(ffn.inst, NEURON_GATED.before)
    start, last = before + claim(ctx) * chunk, ffn.neurons - parameter(ffn.inst, NEURON_GATED.behind)
    if tokens < TOKENS:  # absent tokens are multiplied too, and their memory may be denormal: slow
        zero(areas.x, TOKENS * ffn.lines * form.x_bytes)
    while start < last:
        end = min(start + chunk, last)
        for t in range(0, tokens, TOKENS):
            some = Tokens(min(TOKENS, tokens - t), f + t * stride, stride, areas.scratch + MASKS)
            find_masks(ffn.inst, ctx, t, some)
            for j in range(some.present):
                q8, at, height = q8_block(x, parameter(ffn.inst, NEURON_GATED.x_stride), t + j, tokens)
                form.as_lines(ffn, q8, at, height, areas.x + j * form.x_bytes, TOKENS * form.x_bytes)
            clear(some, start, end)
            n = choose(some, start, end, numbers)
            window = Window(numbers, 0, n, n, False)
            live = all_alive(form, ffn, areas, some, window)
            for first in range(0, live, NEURON_BATCH):
                ups(form, ffn, areas, some, window, first, min(first + NEURON_BATCH, live), live)
        start = before + claim(ctx) * chunk


def _register(dtype):
    one, many = make_form(dtype, 1), make_form(dtype, TOKENS)

    @kernel(f"neuron_gated_{dtype}")
    def run(inst, ctx, tid, n_threads):
        ffn, f = open_ffn(inst, ctx, NEURON_GATED, one.bits, 5, 9), operand(inst, ctx, 2)
        scratch = operand(inst, ctx, 4) + tid * parameter(inst, NEURON_GATED.scratch)
        areas = areas_of(scratch, ffn.lines, one.x_bytes)
        tokens = count(ctx, parameter(inst, NEURON_GATED.rows))
        if tokens == 1:
            single(one, ffn, areas, ctx, f, n_threads)
        else:
            several(many, ffn, areas, ctx, f, tokens, n_threads)
        return 0


for _dtype in NEURON_TYPES:
    _register(_dtype)
