"""Matrix products with weights in tile16 (DESIGN: layouts): `linear_*` is y = x W^T, `gated_*` is act(x G^T) * (x U^T).

A register block holds m row tiles x n tokens of accumulators: each load of activations serves m products and each line
of weights n. Few tokens wait for memory, not for the units; they take more row tiles at once, for each is a stream that
the hardware prefetches by itself. One body serves one token and many, and the operations on a row are the same in the
same order in every block, so a row of the result has the same bits for any number of tokens.

Operands: 0 weights, 1 x, 2 out, 3 bias, 4 scratch, 5 source and 6 norm weight of a fused input. Parameters:
parameters.LINEAR. Twins: reference/linear.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ..abi import COUNT_SEVERAL, FLAG_BIAS, FLAG_RESIDUAL, GATED_SCRATCH_BYTES
from ..parameters import LINEAR
from ..registry import kernel
from ..vector.int8_dot import dot_int8, dot_q4, in_rows, scale_add, start_int8, start_q4, zero_products
from ..vector.record import claim, count, flags, float_parameter, inline, operand, parameter
from ..vector.simd import load_f32x16, prefetch, store_f32x16
from ..vector.targets import fma_splat, load_f16x16, load_scales, row_blocks, token_tiles
from ..vector.tiles import add_block, load_lines, store_apart, store_block, zero_tile
from ..vector.vecmath import activate
from .elementwise import fused_input

AHEAD = 4608
"""Bytes between the weights in work and those asked for (whole records of them): 8 records of q4 in groups of 32. The
hardware's prefetcher starts anew at every page and lags behind; with this a token of 1.1B takes 1/1.19 of the time, of
135M 1/1.13."""
FEW = 1, 2, 3, 4
"""Numbers of tokens that go through several streams of weights, where there are so many (Isa.streams)."""


@inline
def _leave(address, far, tile_bytes):
    return


def _asking(m):
    """What asks for the lines of m row tiles that come `far` bytes behind an address."""

    @inline
    def ask(address, far, tile_bytes):
        for i in range(m):
            prefetch(address + far + i * tile_bytes)

    return ask


def _distance(record_bytes):
    """How far ahead a record asks of `records`, with `left` of them to go and the next weights `following` bytes on."""
    near = AHEAD // record_bytes

    @inline
    def distance(left, records, following):
        return near * record_bytes if left > near else following - (records - near) * record_bytes

    return distance


def product_q4(group, m, n, alone=False):
    """Product of m row tiles with n tokens; `alone`: what follows in memory may not be wanted."""
    lines, ask, distance = group // 8, _leave if alone else _asking(m), _distance(16 * group + 64)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets, following):
        acc = zero_products(m, n)
        for r in range(records):
            far = distance(records - r, records, following)
            for part in range(2):
                ints = start_q4(m, n, offsets)
                for line in range(lines):
                    ask(w + 64 * (part * lines + line), far, tile_bytes)
                    ints = dot_q4(ints, load_lines(m, w + 64 * (part * lines + line), tile_bytes), x)
                    x += 8 * n
                acc = scale_add(acc, ints, load_scales(m, w + 128 * lines + 32 * part, tile_bytes), scales)
                scales += 4 * n
                offsets += 4 * n
            ask(w + 128 * lines, far, tile_bytes)
            w += 128 * lines + 64
        return in_rows(acc)

    return product


def product_int8(group, m, n, alone=False):
    """As `product_q4`."""
    lines, ask, distance = group // 4, _leave if alone else _asking(m), _distance(32 * group + 64)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets, following):
        acc = zero_products(m, n)
        for r in range(records):
            far = distance(records - r, records, following)
            for part in range(2):
                ints = start_int8(m, n, offsets)
                for pair in range(lines // 2):
                    line = w + 64 * (part * lines + 2 * pair)
                    ask(line, far, tile_bytes)
                    ask(line + 64, far, tile_bytes)
                    ints = dot_int8(ints, load_lines(m, line, tile_bytes), load_lines(m, line + 64, tile_bytes), x)
                    x += 8 * n
                acc = scale_add(acc, ints, load_scales(m, w + 128 * lines + 32 * part, tile_bytes), scales)
                scales += 4 * n
                offsets += 4 * n
            ask(w + 128 * lines, far, tile_bytes)
            w += 128 * lines + 64
        return in_rows(acc)

    return product


def _product_f16(group, m, n):
    ask, distance = _asking(1), _distance(64)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets, following):
        acc = zero_tile(n)
        for r in range(records):
            ask(w, distance(records - r, records, following), 0)
            acc = fma_splat(acc, load_f16x16(w), x, stride)
            acc = fma_splat(acc, load_f16x16(w + 32), x + 4, stride)
            w += 64
            x += 8
        return acc

    return product


def _product_f32(group, m, n):
    ask, distance = _asking(1), _distance(64)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets, following):
        acc = zero_tile(n)
        for r in range(records):
            ask(w, distance(records - r, records, following), 0)
            acc = fma_splat(acc, load_f32x16(w), x, stride)
            w += 64
            x += 4
        return acc

    return product


@inline
def input_rows(rec, ctx, scratch):
    """Address of x: quantised rows, or for one token the row that this thread makes of the source."""
    kind = parameter(rec, LINEAR.fused)
    if kind and count(ctx, COUNT_SEVERAL) == 0:
        row = scratch + GATED_SCRATCH_BYTES
        return fused_input(
            operand(rec, ctx, 5), operand(rec, ctx, 6), kind, parameter(rec, LINEAR.width),
            parameter(rec, LINEAR.group), parameter(rec, LINEAR.x_scales), parameter(rec, LINEAR.x_offsets),
            float_parameter(rec, LINEAR.eps), row + parameter(rec, LINEAR.x_stride), row)
    return operand(rec, ctx, 1)


class Place(NamedTuple):
    """What a product works on: its record, and addresses."""

    rec: int
    w: int
    x: int
    out: int
    bias: int
    scratch: int


def in_blocks(steps):
    """Run steps over the tokens from t on, in the blocks that activations are interleaved in.

    `steps` are pairs of the tokens of a block, descending, and the function that computes one: (place, tile, t,
    others).
    """
    (n, step), *fewer = steps
    if not fewer:
        @inline
        def all_tokens(at, tile, t, tokens, others):
            while t + n <= tokens:
                step(at, tile, t, others)
                t += n

        return all_tokens
    go_on = in_blocks(fewer)

    @inline
    def run(at, tile, t, tokens, others):
        while t + n <= tokens:
            step(at, tile, t, others)
            t += n
        go_on(at, tile, t, tokens, others)

    return run


def of_heights(make_step):
    """Steps for `in_blocks`, one for each number of tokens that a block may have."""
    return [(n, make_step(n)) for n in (*token_tiles(), 1)]


def _rows(make_product, group, m, n):
    """Row tiles tile .. tile + m for the n tokens from t on: product, bias, residual, store.

    `others`: how far the weights are that come next, in row tiles; and 0 where tile is the last, which a block of two
    then computes twice, else 1.
    """
    product = make_product(group, m, n)

    @inline
    def step(at, tile, t, others):
        rec = at.rec
        stride, out_stride, size = \
            parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.out_stride), parameter(rec, LINEAR.tile_bytes)
        base, bits, following, apart = at.x + t * stride, flags(rec), others[0], others[1]
        acc = product(at.w + tile * size, size * apart, parameter(rec, LINEAR.records), base, stride,
                      base + n * parameter(rec, LINEAR.x_scales), base + n * parameter(rec, LINEAR.x_offsets),
                      following * size)
        to, apart = at.out + t * out_stride + 64 * tile, 64 * apart
        if bits & FLAG_BIAS:
            acc = add_block(m, acc, at.bias + 64 * tile, 0, apart)
        if bits & FLAG_RESIDUAL:
            acc = add_block(m, acc, to, out_stride, apart)
        store_apart(m, acc, to, out_stride, apart)

    return step


def _in_streams(steps, tiles):
    """Run blocks of few tokens, `tiles` units at a time while there are so many; gives the first unit that is left.

    `steps` are as in `in_blocks`; numbers of tokens that have none are left whole.
    """
    (n, step), *others = steps
    other = _in_streams(others, tiles) if others else inline(_none_done)

    @inline
    def run(at, unit, end, following, tokens):
        if tokens != n:
            return other(at, unit, end, following, tokens)
        while unit + tiles <= end:
            step(at, unit, 0, ((unit + tiles if unit + tiles < end else following) - unit, 1))
            unit += tiles
        return unit

    return run


def _none_done(at, unit, end, following, tokens):
    return unit


def chunk_of_rows(make_product, group):
    """Make what computes row tiles tile .. end for all tokens; `following` is the tile that this thread takes next."""
    m, streams = row_blocks() if group else (1, 1)
    several = in_blocks(of_heights(lambda n: _rows(make_product, group, m, n)))
    few = _in_streams([(n, _rows(make_product, group, streams, n)) for n in FEW], streams)

    @inline
    def in_tiles(at, tile, end, following, tokens):
        while tile < end:
            after = tile + m if tile + m < end else following
            several(at, tile, 0, tokens, (after - tile, 1 if tile + m <= end else 0))
            tile += m

    if streams == m:
        return in_tiles

    @inline
    def run(at, tile, end, following, tokens):
        in_tiles(at, few(at, tile, end, following, tokens), end, following, tokens)

    return run


def in_chunks(chunk_of):
    """Run what computes a chunk of units, on chunks that are claimed one ahead, to ask for their weights in time."""

    @inline
    def run(at, ctx, units, chunk, tokens):
        start = claim(ctx) * chunk
        while start < units:
            following = claim(ctx) * chunk
            chunk_of(at, start, min(start + chunk, units), following if following < units else start, tokens)
            start = following

    return run


def _register_product(name, chunk_of):
    run_chunks = in_chunks(chunk_of)

    @kernel(name)
    def run(rec, ctx, tid, n_threads):
        scratch = operand(rec, ctx, 4) + tid * parameter(rec, LINEAR.scratch)
        at = Place(rec, operand(rec, ctx, 0), input_rows(rec, ctx, scratch), operand(rec, ctx, 2), operand(rec, ctx, 3),
                   scratch)
        run_chunks(at, ctx, parameter(rec, LINEAR.tiles), parameter(rec, LINEAR.chunk),
                   count(ctx, parameter(rec, LINEAR.rows)))
        return 0


def _gated(make_product, group, m, n):
    """Units of a gate and an up row tile, m row tiles at once (1: first the one, then the other), for n tokens."""
    product = make_product(group, m, n)

    @inline
    def step(at, tile, t, others):
        rec, scratch = at.rec, at.scratch
        stride, size = parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.tile_bytes)
        records, base = parameter(rec, LINEAR.records), at.x + t * stride
        scales, offsets = base + n * parameter(rec, LINEAR.x_scales), base + n * parameter(rec, LINEAR.x_offsets)
        for part in range(0, 2, m):
            left = 2 * others[0] - part if part + m > 1 else 1
            acc = product(at.w + (2 * tile + part) * size, size, records, base, stride, scales, offsets, left * size)
            if flags(rec) & FLAG_BIAS:
                acc = add_block(m, acc, at.bias + 128 * tile + 64 * part, 0, 64)
            store_block(1, acc, scratch + 64 * n * part, 64)
        kind, out_stride = parameter(rec, LINEAR.activation), parameter(rec, LINEAR.out_stride)
        for unit in range((m + 1) // 2):
            for j in range(n):
                gate = scratch + 64 * (2 * unit * n + j)
                acted = activate(load_f32x16(gate), kind) * load_f32x16(gate + 64 * n)
                store_f32x16(at.out + 64 * (tile + unit) + (t + j) * out_stride, acted)

    return step


def _chunk_of_units(make_product, group):
    """As `chunk_of_rows`, of units of two row tiles."""
    m, streams = row_blocks() if group else (1, 1)
    several = in_blocks(of_heights(lambda n: _gated(make_product, group, m, n)))
    few = _in_streams([(n, _gated(make_product, group, streams, n)) for n in FEW], streams // 2)

    @inline
    def one_by_one(at, unit, end, following, tokens):
        while unit < end:
            after = unit + 1 if unit + 1 < end else following
            several(at, unit, 0, tokens, (after - unit, 1))
            unit += 1

    if streams <= 2:
        return one_by_one

    @inline
    def run(at, unit, end, following, tokens):
        one_by_one(at, few(at, unit, end, following, tokens), end, following, tokens)

    return run


for _prefix, _chunk_of in (("linear", chunk_of_rows), ("gated", _chunk_of_units)):
    for _group in (32, 64, 128):
        _register_product(f"{_prefix}_q4_g{_group}", _chunk_of(product_q4, _group))
        _register_product(f"{_prefix}_int8_g{_group}", _chunk_of(product_int8, _group))
    _register_product(f"{_prefix}_f16", _chunk_of(_product_f16, 0))
    _register_product(f"{_prefix}_f32", _chunk_of(_product_f32, 0))
