"""Matmuls with weights in the tile16 layout: `linear_*` is y = x W^T, `gated_*` is act(x G^T) * (x U^T).

A register block holds m row tiles x n tokens of accumulators: each load of activations serves m products and each line
of weights serves n. With few tokens a matmul waits for memory, not for the execution units, so it takes more row tiles
at once: each is a stream that the hardware prefetches by itself. The same code serves one token and many, and every
block performs the operations on a row in the same order, so a row of the result has the same bits for any number of
tokens.

With `head_tiles`, `linear_*` multiplies one matrix per head; each has its own columns of x and of the result.

Operands: 0 weights, 1 x, 2 out, 3 bias, 4 scratch, 5 source and 6 norm weight of a fused input, 7 columns that are
multiplied apart. Parameters: parameters.LINEAR. Reference: reference/matmul.py.
"""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.quant import TYPES

from ..abi import COUNT_SEVERAL, FLAG_BIAS, FLAG_RESIDUAL, GATED_SCRATCH_BYTES
from ..parameters import LINEAR
from ..registry import kernel
from ..vector.instruction import claim, count, flags, float_parameter, inline, operand, outlined, parameter
from ..vector.memory import load_f32x16, store_f32x16
from ..vector.scalars import div_i64
from ..vector.targets import fma_splat, load_f16x16, row_blocks, token_tiles
from ..vector.tiles import add_block, store_apart, store_block, zero_tile
from ..vector.vecmath import gated
from .apart import adding_apart, nothing_apart
from .dot_products import asking, distance_of, matmul_of
from .elementwise import fused_input

FEW = 4
"""Tokens, and fewer, that go through several streams of weights (Isa.streams)."""


def _matmul_f16(group, m, n):
    ask, distance = asking(1), distance_of(64)

    @inline
    def matmul(w, apart, records, x, stride, scales, offsets, following, inst):
        acc = zero_tile(n)
        for r in range(records):
            ask(w, distance(records - r, records, following), apart)
            acc = fma_splat(acc, load_f16x16(w), x, stride)
            acc = fma_splat(acc, load_f16x16(w + 32), x + 4, stride)
            w += 64
            x += 8
        return acc

    return matmul


def _matmul_f32(group, m, n):
    ask, distance = asking(1), distance_of(64)

    @inline
    def matmul(w, apart, records, x, stride, scales, offsets, following, inst):
        acc = zero_tile(n)
        for r in range(records):
            ask(w, distance(records - r, records, following), apart)
            acc = fma_splat(acc, load_f32x16(w), x, stride)
            w += 64
            x += 4
        return acc

    return matmul


@inline
def input_rows(inst, ctx, scratch):
    """Address of x: quantised rows, or for one token the row that this thread makes of the source."""
    kind = parameter(inst, LINEAR.fused)
    if kind and count(ctx, COUNT_SEVERAL) == 0:
        row = scratch + GATED_SCRATCH_BYTES
        return fused_input(
            operand(inst, ctx, 5), operand(inst, ctx, 6), kind, parameter(inst, LINEAR.width),
            parameter(inst, LINEAR.group), parameter(inst, LINEAR.x_scales), parameter(inst, LINEAR.x_offsets),
            float_parameter(inst, LINEAR.eps), parameter(inst, LINEAR.left_out),
            row + parameter(inst, LINEAR.x_stride), row)
    return operand(inst, ctx, 1)


class Addresses(NamedTuple):
    """A matmul's instruction and addresses."""

    inst: int
    w: int
    x: int
    out: int
    bias: int
    scratch: int
    apart: int


def in_blocks(steps):
    """Run steps over units of row tiles for all tokens, in the blocks that activations are interleaved in.

    `steps` are (tokens of a block, units that go through together, function that computes one), tokens descending. If
    fewer units are left, two go through together, or one. A function takes (addresses, unit, t, units,
                                                                                how many units
    further the weights are that come next, how many units are between two that go through together); `following` is the
    unit that comes after the last one.
    """
    (n, together, step), *others = steps
    go_on = in_blocks(others) if others else inline(_all_done)

    @inline
    def run(at, unit, end, following, t, tokens, gap):
        stop = tokens - (tokens - t) % n
        if t < stop:
            start = unit
            while start < end:
                units = together if start + together <= end else min(end - start, 2)
                after = start + units if start + units < end else following
                for first in range(t, stop, n):
                    step(at, start, first, units, after - start, gap)
                start += units
        go_on(at, unit, end, following, stop, tokens, gap)

    return run


def _all_done(at, unit, end, following, t, tokens, gap):
    return


def of_heights(make_step):
    """Steps for `in_blocks`, one for each number of tokens that a block may have."""
    return [(n, *make_step(n)) for n in (*token_tiles(), 1)]


def chunk_of(make_step, group):
    """Return a function that computes units unit .. end for all tokens; `following` is the thread's next unit.

    `make_step` gives a step for `in_blocks`: for so many tokens, so many row tiles at once.
    """
    streams = row_tiles(group, 1)
    chunk = in_streams(in_blocks(of_heights(lambda n: make_step(n, row_tiles(group, n)))), streams)
    if streams <= 2:
        return chunk
    halved = in_streams(in_blocks([(1, *make_step(1, streams // 2))]), streams // 2)

    @inline
    def run(at, unit, end, following, tokens):
        if tokens == 1 and parameter(at.inst, LINEAR.halved):
            halved(at, unit, end, following, tokens)
        else:
            chunk(at, unit, end, following, tokens)

    return run


def row_tiles(group, n):
    """Row tiles that a block of n tokens takes at once."""
    m, streams = row_blocks() if group else (1, 1)
    return streams if n <= FEW else m


@inline
def between(units, gap):
    """Units from the first to the second that go through together, and to the third (`simd.row_tile`); 0: the same."""
    return gap * min(units - 1, 1), gap * (min(units - 1, 2) & 2)


def _rows(make_matmul, group, n, m, apart=False):
    """Row tiles for the n tokens from t on, as many as are computed together: matmul, bias, residual, store."""
    matmul, add_apart = make_matmul(group, m, n), adding_apart(n, m) if apart else nothing_apart

    @inline
    def step(at, tile, t, tiles, following, gap):
        inst, heads = at.inst, parameter(at.inst, LINEAR.head_tiles)
        stride, out_stride, size = \
            parameter(inst, LINEAR.x_stride), parameter(inst, LINEAR.out_stride), parameter(inst, LINEAR.tile_bytes)
        base, bits, (pair, pairs) = at.x + t * stride, flags(inst), between(tiles, gap)
        to, apart = at.out + t * out_stride + 64 * tile, (64 * pair, 64 * pairs)
        if heads:
            base += div_i64(tile, heads) * parameter(inst, LINEAR.head_x)
            to += div_i64(tile, heads) * parameter(inst, LINEAR.head_gap)
        acc = matmul(at.w + tile * size, (size * pair, size * pairs), parameter(inst, LINEAR.records), base, stride,
                      base + n * parameter(inst, LINEAR.x_scales), base + n * parameter(inst, LINEAR.x_offsets),
                      following * size, inst)
        acc = add_apart(acc, at, tile, base, pair, pairs, following)
        if bits & FLAG_BIAS:
            acc = add_block(m, acc, at.bias + 64 * tile, 0, apart)
        if bits & FLAG_RESIDUAL:
            acc = add_block(m, acc, to, out_stride, apart)
        store_apart(m, acc, to, out_stride, apart)

    return m, step


def chunk_of_rows(make_matmul, group, apart=False):
    """Do `chunk_of` for row tiles; `apart`: x may have values apart."""
    return chunk_of(lambda n, m: _rows(make_matmul, group, n, m, apart), group)


def in_streams(blocks, units):
    """Run all blocks of tokens over this many units of row tiles, then over the next.

    Units that few tokens take together are those that begin equal parts of the chunk: each stream goes through its part
    without a jump. Neighbours would make it jump at the end of each row tile, 5 KB in rows of 576 columns.
    """

    @inline
    def run(at, unit, end, following, tokens):
        gap = max((end - unit) // units, 1) if tokens <= FEW else 1
        last = unit + gap - 1
        while unit < end:
            if unit > last:  # neighbours: the remainder of the parts, or many tokens
                gap = 1
            after = unit + 1 if unit < last else unit + (units - 1) * gap + 1
            blocks(at, unit, min(unit + units, end), after if after < end else following, 0, tokens, gap)
            unit = after

    return run


def in_chunks(chunk_of):
    """Run the function that computes a chunk of units, on chunks that are claimed one ahead, to ask for their weights
    in time."""

    @inline
    def run(at, ctx, units, chunk, tokens):
        start = claim(ctx) * chunk
        while start < units:
            following = claim(ctx) * chunk
            chunk_of(at, start, min(start + chunk, units), following if following < units else start, tokens)
            start = following

    return run


def _register_matmul(name, chunk_of):
    run_chunks = in_chunks(chunk_of)

    @kernel(name)
    def run(inst, ctx, tid, n_threads):
        scratch = operand(inst, ctx, 4) + tid * parameter(inst, LINEAR.scratch)
        at = Addresses(inst, operand(inst, ctx, 0), input_rows(inst, ctx, scratch), operand(inst, ctx, 2),
                   operand(inst, ctx, 3), scratch, operand(inst, ctx, 7))
        run_chunks(at, ctx, parameter(inst, LINEAR.tiles), parameter(inst, LINEAR.chunk),
                   count(ctx, parameter(inst, LINEAR.rows)))
        return 0


@outlined
def _act(gate, up, n, kind, limit, out, stride):
    """n rows of 16: act(gate) * up."""
    for row in range(n):
        store_f32x16(out + row * stride, gated(load_f32x16(gate + 64 * row), load_f32x16(up + 64 * row), kind, limit))


def _gated(make_matmul, group, n, m, apart=False):
    """Units of a gate and an up row tile for n tokens: both tiles of a unit at once, or m gates and then their ups."""
    together, parts = (1, 1) if m == 2 and n > FEW else (m, 2)
    matmul, add_apart = make_matmul(group, m, n), adding_apart(n, m) if apart else nothing_apart

    @inline
    def step(at, unit, t, units, following, gap):
        inst, scratch = at.inst, at.scratch
        stride, out_stride, size = \
            parameter(inst, LINEAR.x_stride), parameter(inst, LINEAR.out_stride), parameter(inst, LINEAR.tile_bytes)
        records, base = parameter(inst, LINEAR.records), at.x + t * stride
        scales, offsets = base + n * parameter(inst, LINEAR.x_scales), base + n * parameter(inst, LINEAR.x_offsets)
        pair, pairs = (1, 0) if parts == 1 else between(units, 2 * gap)
        for part in range(parts):
            left = 2 * following - part if part + 1 == parts else 1
            acc = matmul(at.w + (2 * unit + part) * size, (size * pair, size * pairs), records, base, stride,
                          scales, offsets, left * size, inst)
            acc = add_apart(acc, at, 2 * unit + part, base, pair, pairs, left)
            if flags(inst) & FLAG_BIAS:
                acc = add_block(m, acc, at.bias + 128 * unit + 64 * part, 0, (64 * pair, 64 * pairs))
            store_block(1, acc, scratch + 64 * n * m * part, 64)
        for i in range(units):
            gate = scratch + 64 * n * i
            _act(gate, gate + 64 * n * together, n, parameter(inst, LINEAR.activation),
                 float_parameter(inst, LINEAR.limit), at.out + 64 * (unit + i * gap) + t * out_stride, out_stride)

    return together, step


def chunk_of_units(make_matmul, group, apart=False):
    """Do `chunk_of_rows` for units of two row tiles."""
    return chunk_of(lambda n, m: _gated(make_matmul, group, n, m, apart), group)


MATMULS = {
    **{end: (matmul_of(row.name), group) for row in TYPES.values()
       for end, group in zip(row.suffixes, row.groups, strict=False)},
    "f16": (_matmul_f16, 0),
    "f32": (_matmul_f32, 0),
}
"""Makers of matmuls and group sizes, by the suffixes of kernel names."""
for _suffix, (_make_matmul, _group) in MATMULS.items():
    _register_matmul(f"linear_{_suffix}", chunk_of_rows(_make_matmul, _group, _group > 0))
    _register_matmul(f"gated_{_suffix}", chunk_of_units(_make_matmul, _group, _group > 0))
