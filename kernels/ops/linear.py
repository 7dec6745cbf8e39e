"""Matrix products with weights in tile16 (DESIGN: layouts): `linear_*` is y = x W^T, `gated_*` is act(x G^T) * (x U^T).

A register block holds m row tiles x n tokens of accumulators: each load of activations serves m products and each line
of weights n. One body serves one token and many, and the operations on a row are the same in the same order in every
block, so a row of the result has the same bits for any number of tokens.

Operands: 0 weights, 1 x, 2 out, 3 bias, 4 scratch, 5 source and 6 norm weight of a fused input. Parameters:
parameters.LINEAR. Twins: reference/linear.py.
"""

from __future__ import annotations

from ..abi import COUNT_SEVERAL, FLAG_BIAS, FLAG_RESIDUAL, GATED_SCRATCH_BYTES
from ..parameters import LINEAR
from ..registry import kernel
from ..vector.int8_dot import dot_int8, dot_q4, in_rows, scale_add, start_int8, start_q4, zero_products
from ..vector.record import claim, count, flags, float_parameter, inline, operand, parameter
from ..vector.simd import load_f32x16, prefetch, store_f32x16
from ..vector.targets import block_tiles, fma_splat, load_f16x16, load_scales
from ..vector.tiles import add_block, load_lines, store_block, zero_tile
from ..vector.vecmath import activate
from .elementwise import fused_input

AHEAD = 4608
"""Bytes between the weights in work and those asked for, 8 records of q4 in groups of 32. The hardware's prefetcher
starts anew at every page and lags behind; with this a token of 1.1B takes 1/1.19 of the time, of 135M 1/1.13."""


@inline
def _leave(address, far, tile_bytes):
    return


def _asking(m):
    """What asks for the lines of m row tiles that come `far` bytes behind an address."""

    @inline
    def ask(address, far, tile_bytes):
        prefetch(address + far)
        if m > 1:
            prefetch(address + far + tile_bytes)

    return ask


def _distance(m, record_bytes):
    """How far ahead m row tiles ask: near their ends for the next m, which begin behind the last of them."""
    near = AHEAD // record_bytes

    @inline
    def distance(left, tile_bytes):
        return AHEAD + (m - 1) * tile_bytes if m > 1 and left <= near else AHEAD

    return distance


def product_q4(group, m, n, alone=False):
    """Product of m row tiles with n tokens; `alone`: what follows in memory may not be wanted."""
    lines, ask, distance = group // 8, _leave if alone else _asking(m), _distance(m, 16 * group + 64)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets):
        acc = zero_products(m, n)
        for r in range(records):
            far = distance(records - r, tile_bytes)
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
    lines, ask, distance = group // 4, _leave if alone else _asking(m), _distance(m, 32 * group + 64)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets):
        acc = zero_products(m, n)
        for r in range(records):
            far = distance(records - r, tile_bytes)
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
    ask = _asking(1)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets):
        acc = zero_tile(n)
        for _r in range(records):
            ask(w, AHEAD, 0)
            acc = fma_splat(acc, load_f16x16(w), x, stride)
            acc = fma_splat(acc, load_f16x16(w + 32), x + 4, stride)
            w += 64
            x += 8
        return acc

    return product


def _product_f32(group, m, n):
    ask = _asking(1)

    @inline
    def product(w, tile_bytes, records, x, stride, scales, offsets):
        acc = zero_tile(n)
        for _r in range(records):
            ask(w, AHEAD, 0)
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


def _block(make_product, group, m, n):
    """Row tiles tile .. tile + m for the n tokens from t on: product, bias, residual, store."""
    product = make_product(group, m, n)

    @inline
    def step(rec, w, x, out, bias, scratch, tile, t):
        stride, out_stride, tile_bytes = \
            parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.out_stride), parameter(rec, LINEAR.tile_bytes)
        base, bits = x + t * stride, flags(rec)
        acc = product(w + tile * tile_bytes, tile_bytes, parameter(rec, LINEAR.records), base, stride,
                      base + n * parameter(rec, LINEAR.x_scales), base + n * parameter(rec, LINEAR.x_offsets))
        to = out + t * out_stride + 64 * tile
        if bits & FLAG_BIAS:
            acc = add_block(m, acc, bias + 64 * tile, 0)
        if bits & FLAG_RESIDUAL:
            acc = add_block(m, acc, to, out_stride)
        store_block(m, acc, to, out_stride)

    return step


def _all_tokens(many, some, one, n, s):
    """Run a step over all tokens, in the blocks that the activations are interleaved in."""

    @inline
    def run(rec, w, x, out, bias, scratch, tile, tokens):
        t = 0
        while t + n <= tokens:
            many(rec, w, x, out, bias, scratch, tile, t)
            t += n
        while t + s <= tokens:
            some(rec, w, x, out, bias, scratch, tile, t)
            t += s
        while t < tokens:
            one(rec, w, x, out, bias, scratch, tile, t)
            t += 1

    return run


def chunk_of_rows(make_product, group):
    """Make what computes row tiles tile .. end for all tokens."""
    row_tiles, n, s = block_tiles()
    m = row_tiles if group else 1
    several = _all_tokens(*(_block(make_product, group, m, tokens) for tokens in (n, s, 1)), n, s)
    single = _all_tokens(*(_block(make_product, group, 1, tokens) for tokens in (n, s, 1)), n, s) if m > 1 else several

    @inline
    def run(rec, w, x, out, bias, tile, end, tokens):
        if m > 1 and tokens > 1:  # one token is bound by memory: nothing to share
            while tile + m <= end:
                several(rec, w, x, out, bias, 0, tile, tokens)
                tile += m
        while tile < end:
            single(rec, w, x, out, bias, 0, tile, tokens)
            tile += 1

    return run


def _register_linear(name, make_product, group):
    rows = chunk_of_rows(make_product, group)

    @kernel(name)
    def run(rec, ctx, tid, n_threads):
        scratch, chunk = operand(rec, ctx, 4) + tid * parameter(rec, LINEAR.scratch), parameter(rec, LINEAR.chunk)
        w, x = operand(rec, ctx, 0), input_rows(rec, ctx, scratch)
        out, bias = operand(rec, ctx, 2), operand(rec, ctx, 3)
        tokens, tiles = count(ctx, parameter(rec, LINEAR.rows)), parameter(rec, LINEAR.tiles)
        start = claim(ctx) * chunk
        while start < tiles:
            rows(rec, w, x, out, bias, start, min(start + chunk, tiles), tokens)
            start = claim(ctx) * chunk
        return 0


def _pair(make_product, group, n):
    """Tiles 2 tile (gate) and 2 tile + 1 (up) for n tokens: one block of two row tiles if registers hold it."""
    together = group > 0 and n > 1 and block_tiles()[0] > 1  # one token: one stream of weights after the other
    product = make_product(group, 2 if together else 1, n)

    @inline
    def step(rec, w, x, out, bias, scratch, tile, t):
        stride, tile_bytes = parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.tile_bytes)
        records, base = parameter(rec, LINEAR.records), x + t * stride
        scales, offsets = base + n * parameter(rec, LINEAR.x_scales), base + n * parameter(rec, LINEAR.x_offsets)
        w += 2 * tile * tile_bytes
        if together:
            both = product(w, tile_bytes, records, base, stride, scales, offsets)
            if flags(rec) & FLAG_BIAS:
                both = add_block(2, both, bias + 128 * tile, 0)
            store_block(1, both, scratch, 64)
        else:
            for part in range(2):
                acc = product(w + part * tile_bytes, tile_bytes, records, base, stride, scales, offsets)
                if flags(rec) & FLAG_BIAS:
                    acc = add_block(1, acc, bias + 128 * tile + 64 * part, 0)
                store_block(1, acc, scratch + 64 * n * part, 64)
        kind, out_stride = parameter(rec, LINEAR.activation), parameter(rec, LINEAR.out_stride)
        for j in range(n):
            acted = activate(load_f32x16(scratch + 64 * j), kind) * load_f32x16(scratch + 64 * (n + j))
            store_f32x16(out + 64 * tile + (t + j) * out_stride, acted)

    return step


def _register_gated(name, make_product, group):
    _, n, s = block_tiles()
    pairs = _all_tokens(*(_pair(make_product, group, tokens) for tokens in (n, s, 1)), n, s)

    @kernel(name)
    def run(rec, ctx, tid, n_threads):
        scratch, chunk = operand(rec, ctx, 4) + tid * parameter(rec, LINEAR.scratch), parameter(rec, LINEAR.chunk)
        w, x = operand(rec, ctx, 0), input_rows(rec, ctx, scratch)
        out, bias = operand(rec, ctx, 2), operand(rec, ctx, 3)
        tokens, tiles = count(ctx, parameter(rec, LINEAR.rows)), parameter(rec, LINEAR.tiles)
        start = claim(ctx) * chunk
        while start < tiles:
            for tile in range(start, min(start + chunk, tiles)):
                pairs(rec, w, x, out, bias, scratch, tile, tokens)
            start = claim(ctx) * chunk
        return 0


for _prefix, _register in (("linear", _register_linear), ("gated", _register_gated)):
    for _group in (32, 64, 128):
        _register(f"{_prefix}_q4_g{_group}", product_q4, _group)
        _register(f"{_prefix}_int8_g{_group}", product_int8, _group)
    _register(f"{_prefix}_f16", _product_f16, 0)
    _register(f"{_prefix}_f32", _product_f32, 0)
