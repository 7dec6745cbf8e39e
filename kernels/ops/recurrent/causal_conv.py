"""Causal depthwise convolution over the last tokens of each sequence.

A unit of work is a block of channels of one sequence, whose tokens it takes in order: each output is a sum over the
weights, the oldest token first, of rows of this pass or of the ring that the sequence keeps (abi/state.py). The ring
gets this pass's last rows when all outputs are there.

Operands: 0 x, 1 out, 2 weights, 3 bias, 4 state. Parameters: parameters.CONV. Flags: FLAG_BIAS.
Reference: reference/recurrent/causal_conv.py.
"""

from __future__ import annotations

from ...abi import (
    COUNT_SEQUENCES,
    CTX_SEQUENCES,
    FLAG_BIAS,
    JOURNAL_TOKENS,
    SEQUENCE_BYTES,
    SEQUENCE_FIRST,
    SEQUENCE_SLOT,
    SEQUENCE_TOKENS,
    TOKEN_BASE,
)
from ...parameters import CONV
from ...registry import kernel
from ...vector.instruction import claim, count, flags, inline, operand, parameter, round_up_16, token
from ...vector.lanes import first_lane, keep_first, splat_f32, sum_lanes
from ...vector.memory import load_f32x16, load_i64, store_first
from ...vector.scalars import div_f32, div_i64, f32_of, sqrt_f32
from ...vector.targets import fma
from ...vector.vecmath import sigmoid

MIN_SQUARE = 1e-6
"""Addend of the squared length of a head."""


@inline
def _input(row, i, start, gate):
    """16 channels of a row's input: its columns, times their gate where there is one."""
    v = load_f32x16(row + 4 * (start + i))
    if gate >= 0:
        v = v * load_f32x16(row + 4 * (gate + i))
    return v


@inline
def _normalise(row, n, further):
    """Divide a head by its length, and by the square root of its size where that is asked for."""
    total = splat_f32(0.0)
    for i in range(0, n, 16):
        v = keep_first(load_f32x16(row + 4 * i), n - i)
        total = fma(v, v, total)
    one = first_lane(splat_f32(1.0))
    scale = div_f32(one, sqrt_f32(sum_lanes(total) + first_lane(splat_f32(MIN_SQUARE))))
    if further:
        scale = scale * div_f32(one, sqrt_f32(f32_of(n)))
    for i in range(0, n, 16):
        store_first(row + 4 * i, load_f32x16(row + 4 * i) * splat_f32(scale), n - i)


@inline
def _inside(row, stride, weights, channels, i, width, at, gate):
    """The sum over all weights of 16 channels whose last `width` tokens have rows in this pass."""
    total = splat_f32(0.0)
    row -= (width - 1) * stride
    for _ in range(width):
        v = load_f32x16(row + 4 * (at + i))
        if gate >= 0:
            v = v * load_f32x16(row + 4 * (gate + i))
        total = fma(v, load_f32x16(weights + 4 * i), total)
        row, weights = row + stride, weights + 4 * channels
    return total


@inline
def _across(inst, row, weights, ring, i, base, t):
    """The same of a token whose window begins before this pass, in the sequence's ring or before its first token."""
    width, channels = parameter(inst, CONV.width), parameter(inst, CONV.channels)
    stride = parameter(inst, CONV.x_stride)
    ring_row, ring_rows, total = 4 * round_up_16(channels), width - 1 + JOURNAL_TOKENS, splat_f32(0.0)
    for j in range(max(0, width - 1 - base - t), width):
        back = width - 1 - j
        if back <= t:
            v = _input(row - back * stride, i, parameter(inst, CONV.start), parameter(inst, CONV.gate_in))
        else:
            v = load_f32x16(ring + (base + t - back) % ring_rows * ring_row + 4 * i)
        total = fma(v, load_f32x16(weights + 4 * (j * channels + i)), total)
    return total


@inline
def _convolve(inst, x, out, weights, bias, ring, first, n, base, t):
    """Token t of the sequence: n channels from `first` on, of the pass's rows x or the ring's."""
    width, channels = parameter(inst, CONV.width), parameter(inst, CONV.channels)
    stride = parameter(inst, CONV.x_stride)
    start, gate, gate_out = parameter(inst, CONV.start), parameter(inst, CONV.gate_in), parameter(inst, CONV.gate_out)
    silu, biased, early, row = parameter(inst, CONV.silu), flags(inst) & FLAG_BIAS, t < width - 1, x + t * stride
    for i in range(first, first + n, 16):
        if early:
            total = _across(inst, row, weights, ring, i, base, t)
        else:
            total = _inside(row, stride, weights, channels, i, width, start, gate)
        if biased:
            total = total + load_f32x16(bias + 4 * i)
        if silu:
            total = total * sigmoid(total)
        if gate_out >= 0:
            total = total * load_f32x16(row + 4 * (gate_out + i))
        store_first(out + 4 * i, total, first + n - i)


@kernel("causal_conv")
def causal_conv(inst, ctx, tid, n_threads):
    """Convolve some columns of each token's row with those of the tokens before it in its sequence."""
    x, out, weights, bias = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2), operand(inst, ctx, 3)
    channels, width, block = parameter(inst, CONV.channels), parameter(inst, CONV.width), parameter(inst, CONV.block)
    size, normed = block * parameter(inst, CONV.span), block * parameter(inst, CONV.normed)
    ring_row, ring_rows = 4 * round_up_16(channels), width - 1 + JOURNAL_TOKENS
    blocks = div_i64(channels + size - 1, size)
    units = count(ctx, COUNT_SEQUENCES) * blocks
    unit = claim(ctx)
    while unit < units:
        number = div_i64(unit, blocks)
        first = (unit - number * blocks) * size
        n = min(size, channels - first)
        entry = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * number
        begin, tokens = load_i64(entry + SEQUENCE_FIRST), load_i64(entry + SEQUENCE_TOKENS)
        base, ring = token(ctx, begin, TOKEN_BASE), operand(inst, ctx, 4) + load_i64(entry + SEQUENCE_SLOT)
        rows = x + begin * parameter(inst, CONV.x_stride)
        for t in range(tokens):
            target = out + (begin + t) * parameter(inst, CONV.out_stride)
            _convolve(inst, rows, target, weights, bias, ring, first, n, base, t)
            for head in range(first, min(first + n, normed), block):
                _normalise(target + 4 * head, block, 2 * head < normed)
        for t in range(max(0, tokens - ring_rows), tokens):
            row, kept = rows + t * parameter(inst, CONV.x_stride), ring + (base + t) % ring_rows * ring_row
            for i in range(first, first + n, 16):
                v = _input(row, i, parameter(inst, CONV.start), parameter(inst, CONV.gate_in))
                store_first(kept + 4 * i, v, first + n - i)
        unit = claim(ctx)
    return 0
