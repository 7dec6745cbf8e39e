"""What the kernels of an FFN in layout neuron are made of: rows times x, columns added up; see `neuron.py`."""

from __future__ import annotations

from .abi import FLAG_LIST
from .blocks import store_tile, zero_tile
from .common import flags, inline, outlined, parameter, place
from .elementwise import LARGE, SMALL
from .lines import (
    column_int8,
    column_q4,
    load_columns,
    row_int8,
    row_q4,
    scales_1,
    scales_2,
    scales_4,
    scales_8,
    start_int8,
    start_q4,
    store_columns,
    store_quarter,
)
from .parameters import NEURON_GATED
from .simd import (
    f32_from_bits,
    first_lane,
    keep_first,
    load_f32,
    load_i32,
    load_i64,
    prefetch,
    splat_f32,
    store_f32x16,
    store_i32,
)


def line_format(dtype):
    """(columns of a line, bits of a code, bytes of a line of x)."""
    return (128, 4, 256) if dtype == "q4" else (64, 8, 192)


@inline
def line_count(groups, group, bits):
    """64-byte lines that hold the codes of a part."""
    return ((groups * group * bits >> 3) + 63) >> 6


@inline
def number(rec, ctx, entry):
    """Number of the neuron that stands at `entry`."""
    return load_i32(place(rec, ctx, 3) + 4 * entry) if flags(rec) & FLAG_LIST else entry


@inline
def fetch(address, nbytes):
    """Ask for the lines of so many bytes."""
    for at in range(address, address + nbytes, 64):
        prefetch(at)


@outlined
def spread(scales, groups, each, first, stop, times, to):
    """Scales of quarters first .. stop of a part as floats, times a factor; those of absent groups are 0.

    `each` quarters share a scale. Whole vectors are read and written: up to 30 bytes behind the scales (an FFN is never
    the last tensor of a bundle: the final norm follows).
    """
    for q in range(first, stop, 16):
        if each == 1:
            v = scales_1(scales + 2 * q)
        elif each == 2:
            v = scales_2(scales + q)
        elif each == 4:
            v = scales_4(scales + (q >> 1))
        else:
            v = scales_8(scales + (q >> 2))
        store_f32x16(to, keep_first(v * splat_f32(times), groups * each - q))
        to += 64


# -- rows --------------------------------------------------------------------------------------------------------------


@inline
def q8_block(rec, x, t, tokens):
    """(address of the block that holds token t, the token's number in it, the block's tokens); see abi.token_blocks."""
    first, n, large = t, 1, tokens - tokens % LARGE
    if t < large:
        first, n = t - t % LARGE, LARGE
    elif t < large + tokens % LARGE // SMALL * SMALL:
        first, n = large + (t - large) // SMALL * SMALL, SMALL
    return x + first * parameter(rec, NEURON_GATED.x_stride), t - first, n


def make_as_lines(dtype):
    """x of token j of a q8 block of n, as lines `stride` bytes apart: values, sums' starts, scales; see lines.py."""
    columns, bits, x_bytes = line_format(dtype)
    sides, start = 8 // bits, start_q4 if dtype == "q4" else start_int8

    @outlined
    def as_lines(rec, block, j, n, to, stride):
        group, groups = parameter(rec, NEURON_GATED.group), parameter(rec, NEURON_GATED.groups)
        padded, half = ((groups + 1) & -2) * group, group // 2
        shift = 5 if group == 32 else 6 if group == 64 else 7
        scales, column = block + n * padded + 4 * j, 0
        while column < groups * group:
            for quarter in range(4):
                c = column + 16 * quarter
                if sides == 2:
                    c = column + 32 * quarter - ((16 * quarter) & (half - 1))
                for k in range(4 * sides):
                    at = c + 4 * (k & 3) + (half if k > 3 else 0)
                    word = load_i32(block + at * n + 4 * j) if at < padded else 0
                    store_i32(to + 64 * (k >> 2) + 16 * quarter + 4 * (k & 3), word)
                scale = load_f32(scales + 4 * n * (c >> shift)) if c < padded else f32_from_bits(0)
                store_quarter(to + x_bytes - 64 + 16 * quarter, scale)
            start(to)
            to += stride
            column += columns

    return as_lines


def make_row_sums(dtype, n):
    """Products of the row at w with n tokens, whose lines lie at x, 16 lanes each, into `sums`.

    `factors` is room for the row's scales; the row at `ahead` is fetched meanwhile.
    """
    _, bits, x_bytes = line_format(dtype)
    step = row_q4 if dtype == "q4" else row_int8

    @outlined
    def row_sums(rec, w, x, ahead, factors, sums):
        group, groups = parameter(rec, NEURON_GATED.group), parameter(rec, NEURON_GATED.groups)
        lines, line, acc = line_count(groups, group, bits), w, zero_tile(n)
        spread(w + (groups * group * bits >> 3), groups, group * bits >> 7, 0, 4 * lines, first_lane(splat_f32(1.0)),
               factors)
        for _ in range(lines):
            acc = step(acc, line, factors, x)
            prefetch(ahead)
            line += 64
            ahead += 64
            factors += 16
            x += n * x_bytes
        fetch(ahead, w + parameter(rec, NEURON_GATED.part_bytes) - line)
        store_tile(acc, sums, 64)

    return row_sums


# -- columns -----------------------------------------------------------------------------------------------------------


@inline
def multiply(groups, each, codes, found, values, end, n, first, stop, factors, size):
    """Factors of the columns at found[0 .. end] for n tokens: scales of lines first .. stop times values.

    They lie column by column, token by token, `size` bytes apart.
    """
    for k in range(end):
        for j in range(n):
            spread(load_i64(found + 8 * k) + codes, groups, each, 4 * first, 4 * stop,
                   load_f32(values + 4 * (n * k + j)), factors)
            factors += size


def make_add(dtype, n, parts, part=0):
    """Add one line of the columns at found[0 .. end] to the sums of n tokens, part after part of the line."""
    quarters, sides = 4 // parts, 8 // line_format(dtype)[1]
    step = column_q4 if dtype == "q4" else column_int8

    @inline
    def add(half, found, end, line, factors, size, sums, stride):
        acc = load_columns(n, quarters, sides, 16 * quarters * part, half, sums, stride)
        for k in range(end):
            acc = step(acc, n, part, load_i64(found + 8 * k) + 64 * line, factors, size)
            factors += n * size
        store_columns(acc, n, quarters, sides, 16 * quarters * part, half, sums, stride)

    if part + 1 == parts:
        return add
    rest = make_add(dtype, n, parts, part + 1)

    @inline
    def both(half, found, end, line, factors, size, sums, stride):
        add(half, found, end, line, factors, size, sums, stride)
        rest(half, found, end, line, factors, size, sums, stride)

    return both


@inline
def zero(address, nbytes):
    """Clear floats, whole vectors."""
    for at in range(address, address + nbytes, 64):
        store_f32x16(at, splat_f32(0.0))
