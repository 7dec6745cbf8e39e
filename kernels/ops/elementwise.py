"""Operations on rows: RMS norm and quantisation of activations.

Operands: 0 source, 1 out, 2 weight or order. Parameters: parameters.ROWS. Reference: reference/elementwise.py.
"""

from __future__ import annotations

from ..abi import FUSED_LEFT_OUT, FUSED_NORM, FUSED_ORDERED
from ..parameters import ROWS
from ..registry import kernel
from ..vector.instruction import claim, count, float_parameter, inline, operand, outlined, parameter
from ..vector.lanes import (
    first_lane,
    keep_first,
    max_lanes,
    round_to_i32,
    splat_f32,
    splat_i32,
    sum_lanes,
    sum_lanes_i32,
    vabs,
    vmax,
)
from ..vector.memory import (
    load_f32,
    load_f32x16,
    load_i32,
    scatter_i8x4,
    store_f32,
    store_f32x16,
    store_i32,
)
from ..vector.scalars import div_f32, div_i64, f32_of, max_f32, sqrt_f32
from ..vector.targets import fma, token_tiles


def _blocks(heights):
    """Return functions that count the blocks of tokens (abi.token_blocks), find one by number, and find a token's.

    The latter two return its first token and its number of tokens; `first` is the first token of all.
    """
    if not heights:
        @inline
        def all_of(tokens):
            return tokens

        @inline
        def single(k, first, tokens):
            return first + k, 1

        return all_of, single, single
    n, (count_others, other, other_of) = heights[0], _blocks(heights[1:])

    @inline
    def count(tokens):
        return tokens // n + count_others(tokens % n)

    @inline
    def block(unit, first, tokens):
        whole = tokens // n
        if unit < whole:
            return first + unit * n, n
        return other(unit - whole, first + whole * n, tokens - whole * n)

    @inline
    def block_of(t, first, tokens):
        whole = tokens - tokens % n
        if t < whole:
            return first + t - t % n, n
        return other_of(t - whole, first + whole, tokens - whole)

    return count, block, block_of


n_blocks, block, block_of = _blocks(token_tiles())
"""A block belongs to one thread: its rows share cache lines."""


@inline
def quantise_row(x, base, j, n, width, group, padded, at_offsets):
    """Row j of a block of n that starts at `base`: floats to int8 with a scale and an offset (-8 x sum) per group.

    Rows of a block are interleaved (abi.token_blocks); x ends at its width, and `padded` values are stored.
    scale = max|x| / 127, q = nearest(x * 127 / max|x|): symmetric, so no zero point enters the products.
    """
    scales, offsets, start = base + n * padded + 4 * j, base + n * at_offsets + 4 * j, 0
    while start < padded:
        largest = splat_f32(0.0)
        for i in range(start, start + group, 16):
            if i < width:
                largest = vmax(largest, vabs(keep_first(load_f32x16(x + 4 * i), width - i)))
        top = max_lanes(largest)
        inverse = splat_f32(div_f32(first_lane(splat_f32(127.0)), max_f32(top, first_lane(splat_f32(1e-30)))))
        total = splat_i32(0)
        for i in range(start, start + group, 16):
            q = splat_i32(0)
            if i < width:
                q = round_to_i32(keep_first(load_f32x16(x + 4 * i), width - i) * inverse)
            scatter_i8x4(base + i * n + 4 * j, q, 4 * n)
            total = total + q
        store_f32(scales, first_lane(splat_f32(top) * splat_f32(1.0 / 127.0)))
        store_i32(offsets, -8 * sum_lanes_i32(total))
        scales += 4 * n
        offsets += 4 * n
        start += group


@inline
def apart_of(scales, offsets):
    """Offset of the values apart in a q8 row: after the offsets, which take as many bytes as the scales."""
    return 2 * offsets - scales


@inline
def in_order(x, order, out, width):
    """Element i of the row is element order[i] of x."""
    for i in range(width):
        store_f32(out + 4 * i, load_f32(x + 4 * load_i32(order + 4 * i)))


@inline
def without(x, columns, n, out, width, apart, stride):
    """The row with zeros in n columns, whose elements go apart, `stride` bytes from one to the next."""
    for i in range(0, width, 16):
        store_f32x16(out + 4 * i, load_f32x16(x + 4 * i))
    for i in range(n):
        column = 4 * load_i32(columns + 4 * i)
        store_f32(apart + stride * i, load_f32(x + column))
        store_f32(out + column, f32_of(0))


@kernel("quantize")
def quantize(inst, ctx, tid, n_threads):
    """f32 rows, or each head of them, to q8 rows (int8 values, f32 scale and int32 offset per group), padded with 0.

    Elements may be taken in the order of operand 2, or be zeros where it says and values apart; operand 3 then holds a
    row of floats per thread.
    """
    x, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    width, heads, blocks = parameter(inst, ROWS.width), max(parameter(inst, ROWS.heads), 1), n_blocks(rows)
    unit = claim(ctx)
    while unit < blocks * heads:
        head = div_i64(unit, blocks)
        first, n = block(unit - head * blocks, 0, rows)
        base, start = out + head * parameter(inst, ROWS.head_out), x + 4 * head * width
        base += first * parameter(inst, ROWS.out_stride)
        for j in range(n):
            row = start + (first + j) * parameter(inst, ROWS.in_stride)
            if parameter(inst, ROWS.ordered):
                ordered = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
                in_order(row, operand(inst, ctx, 2), ordered, width)
                row = ordered
            if parameter(inst, ROWS.left_out):
                kept = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
                apart = base + n * apart_of(parameter(inst, ROWS.scales), parameter(inst, ROWS.offsets)) + 4 * j
                without(row, operand(inst, ctx, 2), parameter(inst, ROWS.left_out), kept, width, apart, 4 * n)
                row = kept
            quantise_row(row, base, j, n, width, parameter(inst, ROWS.group), parameter(inst, ROWS.scales),
                         parameter(inst, ROWS.offsets))
        unit = claim(ctx)
    return 0


@inline
def norm_scale(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of `width` floats."""
    total = splat_f32(0.0)
    for i in range(0, width, 16):
        v = keep_first(load_f32x16(x + 4 * i), width - i)
        total = fma(v, v, total)
    mean = div_f32(sum_lanes(total), f32_of(width))
    return div_f32(first_lane(splat_f32(1.0)), sqrt_f32(mean + eps))


@inline
def normalise(x, weight, out, width, scale):
    """out = x * scale * weight for whole vectors; weights past `width` are stored as zeros, so the padding is 0."""
    for i in range(0, width, 16):
        v = keep_first(load_f32x16(x + 4 * i) * splat_f32(scale) * load_f32x16(weight + 4 * i), width - i)
        store_f32x16(out + 4 * i, v)


@kernel("rms_norm_f32")
def rms_norm_f32(inst, ctx, tid, n_threads):
    """RMS norm (arXiv 1910.07467, equation 4) of f32 rows."""
    x, out, weight = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    width, rows = parameter(inst, ROWS.width), count(ctx, parameter(inst, ROWS.rows))
    t = claim(ctx)
    while t < rows:
        source = x + t * parameter(inst, ROWS.in_stride)
        normalise(source, weight, out + t * parameter(inst, ROWS.out_stride), width,
                  norm_scale(source, width, float_parameter(inst, ROWS.eps)))
        t = claim(ctx)
    return 0


@kernel("rms_norm_q8")
def rms_norm_q8(inst, ctx, tid, n_threads):
    """RMS norm of f32 rows, quantised on the way out; operand 3 holds a row of floats per thread."""
    x, out, weight = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    width, rows = parameter(inst, ROWS.width), count(ctx, parameter(inst, ROWS.rows))
    row = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
    unit = claim(ctx)
    while unit < n_blocks(rows):
        first, n = block(unit, 0, rows)
        base = out + first * parameter(inst, ROWS.out_stride)
        for j in range(n):
            source = x + (first + j) * parameter(inst, ROWS.in_stride)
            normalise(source, weight, row, width, norm_scale(source, width, float_parameter(inst, ROWS.eps)))
            quantise_row(row, base, j, n, width, parameter(inst, ROWS.group), parameter(inst, ROWS.scales),
                         parameter(inst, ROWS.offsets))
        unit = claim(ctx)
    return 0


@outlined
def fused_input(source, weight, kind, width, group, scales, offsets, eps, left_out, row, scratch):
    """Apply rms_norm_q8 (FUSED_NORM) or quantize to one token, into scratch; return the q8 row's address.

    `row` receives the normalised floats, those in the order that `weight` then is (FUSED_ORDERED), or those without the
    `left_out` columns that it names (FUSED_LEFT_OUT): after the q8 row.
    """
    if kind == FUSED_NORM:
        normalise(source, weight, row, width, norm_scale(source, width, eps))
        source = row
    if kind == FUSED_ORDERED:
        in_order(source, weight, row, width)
        source = row
    if kind == FUSED_LEFT_OUT:
        without(source, weight, left_out, row, width, scratch + apart_of(scales, offsets), 4)
        source = row
    quantise_row(source, scratch, 0, 1, width, group, scales, offsets)
    return scratch
