"""Building blocks of FFN kernels in layout neuron: rows times x, sums of columns; see `neuron_gated.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from edgeinfer.quant import TYPES

from ...abi import neuron_line_columns
from ...vector import neuron_rows
from ...vector.instruction import inline, outlined
from ...vector.lanes import keep_first, splat_f32
from ...vector.memory import load_f32, load_i32, load_i64, prefetch, store_f32x16, store_i32
from ...vector.scalars import div_i64, f32_from_bits
from ...vector.tiles import store_tile, zero_tile
from ..elementwise import block_of
from .ffn import fetch

TOKENS = neuron_rows.block_tokens()


class Form(NamedTuple):
    """Constants and helper functions of one type of weights and number of tokens; a constant for Numba.

    `n` tokens (1 or TOKENS) go through a step together. A code has `bits` bits, a 64-byte line has `columns` codes, the
    matching line of x has `x_bytes` bytes.
    """

    n: int
    bits: int
    columns: int
    x_bytes: int
    as_lines: Any
    row_sums: Any
    add: Any


class Columns(NamedTuple):
    """Columns that are added up together."""

    found: int
    """Address of their addresses."""
    values: int
    """Address of their values: for each column those of all tokens."""
    n: int
    factors: int
    """Room for their scales times values."""
    size: int
    """Bytes of the factors of a column for one token."""


STEPS = {"q2": (neuron_rows.row_q2, neuron_rows.start_q2, neuron_rows.column_q2),
         "q4": (neuron_rows.row_q4, neuron_rows.start_q4, neuron_rows.column_q4),
         "int8": (neuron_rows.row_int8, neuron_rows.start_int8, neuron_rows.column_int8)}


def make_form(dtype, n):
    """Make the form of weights of a type (one of STEPS) and n tokens (1 or TOKENS)."""
    bits, columns, (row, start, column) = TYPES[dtype].bits, neuron_line_columns(dtype), STEPS[dtype]
    sides, x_bytes = 8 // bits, columns + 128
    return Form(n, bits, columns, x_bytes, _as_lines(start, sides, columns, x_bytes), _row_sums(row, n, x_bytes),
                _add(column, sides, n, neuron_rows.column_parts(sides, n)))


@inline
def quarters(scales, each, q):
    """Scales of 16 quarters from the q-th of a part on, as floats: `each` quarters share one.

    A whole vector is read: up to 30 bytes after the scales (the writer ends weights.bin with zeros).
    """
    if each == 1:
        return neuron_rows.scales_1(scales + 2 * q)
    if each == 2:
        return neuron_rows.scales_2(scales + q)
    if each == 4:
        return neuron_rows.scales_4(scales + (q >> 1))
    return neuron_rows.scales_8(scales + (q >> 2))


@outlined
def spread(scales, groups, each, first, stop, times, to):
    """Write scales of quarters first .. stop of a part as floats, times a factor; those of absent groups are 0."""
    for q in range(first, stop, 16):
        store_f32x16(to, keep_first(quarters(scales, each, q) * splat_f32(times), groups * each - q))
        to += 64


# -- rows --------------------------------------------------------------------------------------------------------------


@inline
def q8_block(x, stride, t, tokens):
    """Return the address of the block that holds token t, the token's number there, its tokens; abi.token_blocks."""
    first, n = block_of(t, 0, tokens)
    return x + first * stride, t - first, n


def _as_lines(start, sides, columns, x_bytes):
    """Write x of token j of a q8 block of n as lines `stride` bytes apart: values, sums' starts, scales."""

    @outlined
    def as_lines(ffn, block, j, n, to, stride):
        group, padded, piece = ffn.group, ((ffn.groups + 1) & -2) * ffn.group, ffn.group // sides
        shift = 5 if group == 32 else 6 if group == 64 else 7
        scales, column = block + n * padded + 4 * j, 0
        while column < ffn.groups * group:
            for quarter in range(4):
                c = column + 16 * sides * quarter - (sides - 1) * ((16 * quarter) & (piece - 1))
                for k in range(4 * sides):
                    at = c + 4 * (k & 3) + piece * (k >> 2)
                    word = load_i32(block + at * n + 4 * j) if at < padded else 0
                    store_i32(to + 64 * (k >> 2) + 16 * quarter + 4 * (k & 3), word)
                scale = load_f32(scales + 4 * n * (c >> shift)) if c < padded else f32_from_bits(0)
                neuron_rows.store_quarter(to + x_bytes - 64 + 16 * quarter, scale)
            start(to)
            to += stride
            column += columns

    return as_lines


def _row_sums(step, n, x_bytes):
    """Multiply the row at w with n tokens, whose lines are at x; 16 lanes of each go to `sums`.

    The row at `ahead` is fetched meanwhile.
    """

    @outlined
    def row_sums(ffn, w, x, ahead, sums):
        scales, acc, away, q = w + ffn.codes, zero_tile(n), ahead - w, 0
        whole = min(ffn.lines >> 2, div_i64(ffn.groups * ffn.each, 16))
        for _ in range(whole):  # 4 lines have 16 quarters
            prefetch(w + away)
            prefetch(w + away + 64)
            prefetch(w + away + 128)
            prefetch(w + away + 192)
            acc = step(acc, 4, w, quarters(scales, ffn.each, q), x)
            q += 16
            w += 256
            x += 4 * n * x_bytes
        if 4 * whole < ffn.lines:
            rest = keep_first(quarters(scales, ffn.each, q), ffn.groups * ffn.each - q)
            for _ in range(ffn.lines - 4 * whole):
                prefetch(w + away)
                acc = step(acc, 1, w, rest, x)
                rest = neuron_rows.next_quarters(rest)
                w += 64
                x += n * x_bytes
        fetch(w + away, ffn.part - 64 * ffn.lines)
        store_tile(acc, sums, 64)

    return row_sums


# -- columns -----------------------------------------------------------------------------------------------------------


@inline
def multiply(ffn, columns, tokens, first, stop):
    """Write the columns' factors, column by column, token by token: scales of lines first .. stop times values."""
    factors = columns.factors
    for k in range(columns.n):
        for j in range(tokens):
            spread(load_i64(columns.found + 8 * k) + ffn.codes, ffn.groups, ffn.each, 4 * first, 4 * stop,
                   load_f32(columns.values + 4 * (tokens * k + j)), factors)
            factors += columns.size


def _add(step, sides, n, parts, part=0):
    """Add one line of columns, the first of whose factors is at `factors`, to n tokens' sums, part after part."""
    quarters = 4 // parts

    @inline
    def add(ffn, columns, line, factors, sums, stride):
        piece = ffn.group // sides
        acc = neuron_rows.load_columns(n, quarters, sides, 16 * quarters * part, piece, sums, stride)
        for k in range(columns.n):
            acc = step(acc, n, part, load_i64(columns.found + 8 * k) + 64 * line, factors, columns.size)
            factors += n * columns.size
        neuron_rows.store_columns(acc, n, quarters, sides, 16 * quarters * part, piece, sums, stride)

    if part + 1 == parts:
        return add
    rest = _add(step, sides, n, parts, part + 1)

    @inline
    def both(ffn, columns, line, factors, sums, stride):
        add(ffn, columns, line, factors, sums, stride)
        rest(ffn, columns, line, factors, sums, stride)

    return both


@inline
def zero(address, nbytes):
    """Clear floats, whole vectors."""
    for at in range(address, address + nbytes, 64):
        store_f32x16(at, splat_f32(0.0))
