"""Matrix products with weights in tile16 (DESIGN: layouts): `linear_*` is y = x W^T, `gated_*` is act(x G^T) * (x U^T).

One body serves one token and many: a register tile of n tokens runs the same operations in the same order for each of
them, so a row of the result has the same bits for any number of tokens. Weights stream once per token tile.

Places: 0 weights, 1 x, 2 out, 3 bias, 4 scratch (gated). Parameters: parameters.LINEAR. Twins: reference/linear.py.
"""

from __future__ import annotations

from .abi import FLAG_BIAS, FLAG_RESIDUAL
from .common import claim, count, flags, inline, parameter, place
from .parameters import LINEAR
from .registry import kernel
from .simd import high_nibbles, load_f32x16, load_line, load_tile, low_nibbles, store_f32x16, store_tile, tile_add, tile_from_sums, zero_tile
from .targets import dot_s8, dot_u8, fma_splat, load_f16x16, scale_add, start_s8, tile_heights
from .vecmath import activate


def _product_q4(group, n):
    lines = group // 8

    @inline
    def product(w, records, x, stride, scales, sums):
        acc = zero_tile(n)
        for _r in range(records):
            w_scales = w + 2 * group * 8
            for part in range(2):
                ints = tile_from_sums(n, x + sums, stride, -8)  # codes are weight + 8
                for line in range(lines):
                    codes = load_line(w + 64 * line)
                    ints = dot_u8(ints, low_nibbles(codes), x + 8 * line, stride)
                    ints = dot_u8(ints, high_nibbles(codes), x + 8 * line + 4, stride)
                acc = scale_add(acc, ints, load_f16x16(w_scales + 32 * part), x + scales, stride)
                w += 64 * lines
                x += group
                scales += 4 - group
                sums += 4 - group
            w += 64
        return acc

    return product


def _product_int8(group, n):
    lines = group // 4

    @inline
    def product(w, records, x, stride, scales, sums):
        acc = zero_tile(n)
        for _r in range(records):
            w_scales = w + 2 * group * 16
            for part in range(2):
                ints = start_s8(n, x + sums, stride)
                for line in range(lines):
                    ints = dot_s8(ints, load_line(w + 64 * line), x + 4 * line, stride)
                acc = scale_add(acc, ints, load_f16x16(w_scales + 32 * part), x + scales, stride)
                w += 64 * lines
                x += group
                scales += 4 - group
                sums += 4 - group
            w += 64
        return acc

    return product


def _product_f16(group, n):
    @inline
    def product(w, records, x, stride, scales, sums):
        acc = zero_tile(n)
        for _r in range(records):
            acc = fma_splat(acc, load_f16x16(w), x, stride)
            acc = fma_splat(acc, load_f16x16(w + 32), x + 4, stride)
            w += 64
            x += 8
        return acc

    return product


def _product_f32(group, n):
    @inline
    def product(w, records, x, stride, scales, sums):
        acc = zero_tile(n)
        for _r in range(records):
            acc = fma_splat(acc, load_f32x16(w), x, stride)
            w += 64
            x += 4
        return acc

    return product


def _linear(make_product, group, n):
    """One tile of 16 rows for n tokens: product, bias, residual, store."""
    product = make_product(group, n)

    @inline
    def step(w, x, out, bias, tile, rec, scratch):
        stride, out_stride, bits = parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.out_stride), flags(rec)
        w += tile * parameter(rec, LINEAR.tile_bytes)
        acc = product(w, parameter(rec, LINEAR.records), x, stride, parameter(rec, LINEAR.x_scales), parameter(rec, LINEAR.x_sums))
        out += 64 * tile
        if bits & FLAG_BIAS:
            acc = tile_add(acc, load_f32x16(bias + 64 * tile))
        if bits & FLAG_RESIDUAL:
            acc = tile_add(load_tile(acc, out, out_stride), acc)
        store_tile(acc, out, out_stride)

    return step


def _gated(make_product, group, n):
    """Tiles 2 * tile (gate) and 2 * tile + 1 (up) for n tokens."""
    product = make_product(group, n)

    @inline
    def step(w, x, out, bias, tile, rec, scratch):
        stride, tile_bytes = parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.tile_bytes)
        records, scales, sums = parameter(rec, LINEAR.records), parameter(rec, LINEAR.x_scales), parameter(rec, LINEAR.x_sums)
        w += 2 * tile * tile_bytes
        gate = product(w, records, x, stride, scales, sums)
        up = product(w + tile_bytes, records, x, stride, scales, sums)
        if flags(rec) & FLAG_BIAS:
            gate = tile_add(gate, load_f32x16(bias + 128 * tile))
            up = tile_add(up, load_f32x16(bias + 128 * tile + 64))
        store_tile(gate, scratch, 64)
        store_tile(up, scratch + 64 * n, 64)
        kind, out_stride = parameter(rec, LINEAR.activation), parameter(rec, LINEAR.out_stride)
        for t in range(n):
            acted = activate(load_f32x16(scratch + 64 * t), kind) * load_f32x16(scratch + 64 * (n + t))
            store_f32x16(out + 64 * tile + t * out_stride, acted)

    return step


def _register(name, make_step, make_product, group):
    n, m = tile_heights()
    many, some, one = make_step(make_product, group, n), make_step(make_product, group, m), make_step(make_product, group, 1)

    @kernel(name)
    def run(rec, ctx, tid, n_threads):
        w, x, out, bias = place(rec, ctx, 0), place(rec, ctx, 1), place(rec, ctx, 2), place(rec, ctx, 3)
        tokens, tiles, chunk = count(ctx, parameter(rec, LINEAR.rows)), parameter(rec, LINEAR.tiles), parameter(rec, LINEAR.chunk)
        stride, out_stride = parameter(rec, LINEAR.x_stride), parameter(rec, LINEAR.out_stride)
        scratch = place(rec, ctx, 4) + tid * parameter(rec, LINEAR.scratch)
        start = claim(ctx) * chunk
        while start < tiles:
            for tile in range(start, min(start + chunk, tiles)):
                t = 0
                while t + n <= tokens:
                    many(w, x + t * stride, out + t * out_stride, bias, tile, rec, scratch)
                    t += n
                while t + m <= tokens:
                    some(w, x + t * stride, out + t * out_stride, bias, tile, rec, scratch)
                    t += m
                while t < tokens:
                    one(w, x + t * stride, out + t * out_stride, bias, tile, rec, scratch)
                    t += 1
            start = claim(ctx) * chunk
        return 0


for _prefix, _make_step in (("linear", _linear), ("gated", _gated)):
    for _group in (32, 64, 128):
        _register(f"{_prefix}_q4_g{_group}", _make_step, _product_q4, _group)
        _register(f"{_prefix}_int8_g{_group}", _make_step, _product_int8, _group)
    _register(f"{_prefix}_f16", _make_step, _product_f16, 0)
    _register(f"{_prefix}_f32", _make_step, _product_f32, 0)
