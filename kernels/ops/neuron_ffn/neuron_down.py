"""The second half of an FFN in layout neuron, f D^T, by outputs; see `neuron_gated.py`.

With FLAG_NORM_OF_F it is norm(f) D^T. A column is multiplied by its neuron's value and weight, and the sums of a token
by 1 / sqrt(mean(f^2) + eps): a neuron whose value is 0 still has nothing to add.

Operands: 0 weights, 1 f, 2 out, 3 scratch, 4 bias, 5 sums of blocks, 6 slot of each cluster of cold neurons, 7 slots,
8 weight of the norm of f. Parameters: parameters.NEURON_DOWN. Reference: reference/neuron_ffn/ffn.py.
"""

from __future__ import annotations

from ...abi import (
    FLAG_DENSE,
    FLAG_RESIDUAL,
    NEURON_BATCH,
    NEURON_COLUMNS,
    NEURON_LINES,
    NEURON_TOKENS,
    NEURON_TYPES,
    NEURON_WINDOW,
)
from ...parameters import NEURON_DOWN
from ...registry import kernel
from ...vector.instruction import claim, count, flags, float_parameter, inline, operand, outlined, parameter
from ...vector.lanes import splat_f32
from ...vector.memory import load_f32, load_f32x16, load_i64, store_f32, store_f32x16, store_i64
from ...vector.scalars import div_i64, f32_from_bits
from ..elementwise import norm_scale
from .ffn import Tokens, column_at, fetch, for_column, open_ffn
from .neuron_parts import TOKENS, Columns, make_form, multiply, zero

# A thread's scratch: sums of a block, totals, factors of a batch, addresses of a block's live columns, their values.
TOTALS = 4 * NEURON_TOKENS * NEURON_COLUMNS
FACTORS = 2 * TOTALS
FACTOR_BYTES = 16 * NEURON_LINES
FOUND = FACTORS + NEURON_BATCH * NEURON_TOKENS * FACTOR_BYTES
VALUES = FOUND + 8 * (NEURON_WINDOW + 1)


@outlined
def find(ffn, tokens, scratch, first, end):
    """Find the neurons first .. end with a value that is not 0: addresses of their columns, values of all TOKENS."""
    n = 0
    for neuron in range(first, end):
        live = flags(ffn.inst) & FLAG_DENSE
        for j in range(TOKENS):
            value = load_f32(tokens.f + j * tokens.stride + 4 * neuron) if j < tokens.present else f32_from_bits(0)
            store_f32(scratch + VALUES + 4 * (TOKENS * n + j), for_column(ffn, neuron, value))
            live |= value != 0
        store_i64(scratch + FOUND + 8 * n, column_at(ffn, neuron))
        n += live != 0
    return n


@inline
def fetch_ahead(ffn, scratch, begin, m, at, nbytes):
    """Ask for a piece of each column of the batch that begins with the found column `begin`, of m."""
    for k in range(begin, min(begin + NEURON_BATCH, m)):
        fetch(load_i64(scratch + FOUND + 8 * k) + at, nbytes)


@inline
def factor_of(ffn, f):
    """Return the factor of a token's outputs: 1 / sqrt(mean(f^2) + eps) if f has a norm, else 0 for none."""
    return norm_scale(f, ffn.neurons, float_parameter(ffn.inst, NEURON_DOWN.eps)) if ffn.by else f32_from_bits(0)


@inline
def finish(ffn, column, y, factor, out):
    """Store 16 outputs from `column` on, with bias and residual."""
    if ffn.by:
        y = y * splat_f32(factor)
    if ffn.bias:
        y = load_f32x16(ffn.bias + 4 * column) + y
    if flags(ffn.inst) & FLAG_RESIDUAL:
        y = load_f32x16(out + 4 * column) + y
    store_f32x16(out + 4 * column, y)


@outlined
def outputs(form, ffn, tokens, scratch, first, stop, out):
    """Store the outputs of lines first .. stop for some tokens, beginning at `out`."""
    stride, totals = 4 * form.columns * (stop - first), scratch + TOTALS
    scales, scale_bytes = ffn.codes + div_i64(8 * first, ffn.each), div_i64(8 * (stop - first), ffn.each) + 64
    zero(totals, TOKENS * stride)
    end = 0
    while end < ffn.neurons:
        start, end = end, min(end + parameter(ffn.inst, NEURON_DOWN.block), ffn.neurons)
        m = find(ffn, tokens, scratch, start, end)
        zero(scratch, TOKENS * stride)
        fetch_ahead(ffn, scratch, 0, m, scales, scale_bytes)
        fetch_ahead(ffn, scratch, 0, m, 64 * first, 64 * (stop - first))
        for begin in range(0, m, NEURON_BATCH):
            fetch_ahead(ffn, scratch, begin + NEURON_BATCH, m, scales, scale_bytes)
            columns = Columns(scratch + FOUND + 8 * begin, scratch + VALUES + 4 * TOKENS * begin,
                              min(NEURON_BATCH, m - begin), scratch + FACTORS, FACTOR_BYTES)
            multiply(ffn, columns, TOKENS, first, stop)
            for line in range(first, stop):
                at = line - first
                fetch_ahead(ffn, scratch, begin + NEURON_BATCH, m, 64 * line, 1)
                form.add(ffn, columns, line, columns.factors + 16 * at, scratch + 4 * form.columns * at, stride)
        for at in range(0, TOKENS * stride, 64):
            store_f32x16(totals + at, load_f32x16(totals + at) + load_f32x16(scratch + at))
    for j in range(tokens.present):
        factor = factor_of(ffn, tokens.f + j * tokens.stride)
        for c in range(form.columns * first, min(form.columns * stop, parameter(ffn.inst, NEURON_DOWN.width)), 16):
            finish(ffn, c, load_f32x16(totals + j * stride + 4 * (c - form.columns * first)), factor,
                   out + j * parameter(ffn.inst, NEURON_DOWN.out_stride))


@inline
def merge(form, ffn, f, sums, first, stop, out):
    """Add up the sums of blocks, for one token."""
    factor = factor_of(ffn, f)
    stride, height = 4 * form.columns * ffn.lines, parameter(ffn.inst, NEURON_DOWN.block)
    blocks = div_i64(ffn.neurons + height - 1, height)
    for c in range(form.columns * first, min(form.columns * stop, parameter(ffn.inst, NEURON_DOWN.width)), 16):
        total, at = splat_f32(0.0), sums + 4 * c
        for _ in range(blocks):
            total = total + load_f32x16(at)
            at += stride
        finish(ffn, c, total, factor, out)


def _register(dtype):
    form = make_form(dtype, TOKENS)

    @kernel(f"neuron_down_{dtype}")
    def run(inst, ctx, tid, n_threads):
        ffn, f, out = open_ffn(inst, ctx, NEURON_DOWN, form.bits, 4, 6), operand(inst, ctx, 1), operand(inst, ctx, 2)
        x_stride, out_stride = parameter(inst, NEURON_DOWN.x_stride), parameter(inst, NEURON_DOWN.out_stride)
        scratch = operand(inst, ctx, 3) + tid * parameter(inst, NEURON_DOWN.scratch)
        tokens, chunk = count(ctx, parameter(inst, NEURON_DOWN.rows)), max(2, parameter(inst, NEURON_DOWN.chunk) & -2)
        first = claim(ctx) * chunk
        while first < ffn.lines:
            stop = min(first + chunk, ffn.lines)
            if tokens == 1:
                merge(form, ffn, f, operand(inst, ctx, 5), first, stop, out)
            else:
                for t in range(0, tokens, TOKENS):
                    some = Tokens(min(TOKENS, tokens - t), f + t * x_stride, x_stride, 0)
                    outputs(form, ffn, some, scratch, first, stop, out + t * out_stride)
            first = claim(ctx) * chunk
        return 0


for _dtype in NEURON_TYPES:
    _register(_dtype)
