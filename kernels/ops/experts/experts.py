"""Matmuls of an MoE model's experts, whose matrices in tile16 are at equal distances.

`experts_gated_*` is act(x G^T) * (x U^T) of each (token, expert) of the list, in its order; `experts_down_*` adds the
weighted f D^T of each token's experts to its row, or without FLAG_RESIDUAL to zeros. Both run the register blocks of
`linear.py` over the tokens of one expert after the other, so only matrices of experts that some token goes through are
read, each once.

`experts_gated` is claimed by chunks of an expert's rows. In `experts_down` a thread has some rows of the output and
goes with them through all experts, so it alone adds to them, by expert: which tokens share the pass, how many threads
there are and where chunks end changes no bit. A pass of one token reads the row of `route` itself as the list, and its
threads quantise its rows themselves.

With FLAG_SLOTS matrices are where `experts_resolve` has put them, and an instruction computes some of the experts: then
the instructions of a matmul follow each other, by experts, and give the bits of the one.

Operands: 0 weights, or slots, 1 x (rows in the order of the list), 2 out, 3 bias, 4 scratch, 5 source, 6 rows of
`route`, 7 the list of `sort_routes`, 8 LOCATION_* of the layer's experts. Parameters: parameters.LINEAR. Reference:
reference/experts/experts.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ...abi import COUNT_SEVERAL, FLAG_BIAS, FLAG_RESIDUAL, FUSED_QUANTISE, GATED_SCRATCH_BYTES
from ...parameters import LINEAR
from ...registry import kernel
from ...routes import (
    FLAG_SLOTS,
    LINE,
    LOCATION_BYTES,
    LOCATION_DOWN,
    LOCATION_GATE_UP,
    ROUTE_BYTES,
    ROUTE_EXPERT,
    ROUTE_SEGMENTS,
    ROUTE_TOKEN,
    ROUTE_WEIGHT,
    SEGMENT_COUNT,
    SEGMENT_EXPERT,
    SEGMENT_FIRST,
)
from ...vector.instruction import claim, count, flags, inline, operand, outlined, parameter
from ...vector.lanes import splat_f32
from ...vector.memory import load_f32, load_f32x16, load_i32, store_f32x16
from ...vector.scalars import div_i64
from ...vector.targets import fma
from ...vector.tiles import add_block, store_block
from ..elementwise import fused_input
from ..matmul import MATMULS, Addresses, between, chunk_of, chunk_of_units


class Part(NamedTuple):
    """Addresses for the matmuls of one expert: as `matmul.Addresses`, and its entries of the list."""

    inst: int
    w: int
    x: int
    out: int
    bias: int
    scratch: int
    entries: int


class Work(NamedTuple):
    """Work of an instruction, for the tokens of this forward pass."""

    entries: int
    """Address of the list."""
    pairs: int
    """Number of entries; 0 for the row of a single token."""
    segments: int
    x: int
    """Address of the first entry's row."""
    stride: int
    """Bytes from the row of an entry to that of the next; 0 if a single token's experts read the same row."""


@inline
def work_of(inst, ctx, scratch):
    """Find the list and the rows; those of a single token are quantised here, by each thread for itself."""
    active, tokens = parameter(inst, LINEAR.active), count(ctx, parameter(inst, LINEAR.rows))
    if count(ctx, COUNT_SEVERAL):
        entries = operand(inst, ctx, 7)
        return Work(entries, tokens * active, load_i32(entries + ROUTE_SEGMENTS), operand(inst, ctx, 1),
                    parameter(inst, LINEAR.x_stride))
    source, apart = operand(inst, ctx, 5), parameter(inst, LINEAR.source_stride)
    if parameter(inst, LINEAR.fused) == 0:
        return Work(operand(inst, ctx, 6), 0, tokens * active, source, apart)
    own, stride = scratch + GATED_SCRATCH_BYTES, parameter(inst, LINEAR.x_stride)
    for k in range(tokens * active if apart else tokens):
        fused_input(source + k * apart, source, FUSED_QUANTISE, parameter(inst, LINEAR.width),
                    parameter(inst, LINEAR.group), parameter(inst, LINEAR.x_scales), parameter(inst, LINEAR.x_offsets),
                    load_f32(source), 0, own, own + k * stride)
    return Work(operand(inst, ctx, 6), 0, tokens * active, own, stride if apart else 0)


@inline
def segment(work, s):
    """Expert of segment s, its first entry, and how many it has."""
    if work.pairs == 0:
        return load_i32(work.entries + ROUTE_BYTES * s + ROUTE_EXPERT), s, 1
    at = work.entries + ROUTE_BYTES * (work.pairs + s)
    return load_i32(at + SEGMENT_EXPERT), load_i32(at + SEGMENT_FIRST), load_i32(at + SEGMENT_COUNT)


@inline
def location_of(inst, ctx, expert, field):
    """Return the address of an expert's matrix, or of its two, counted from operand 0."""
    if flags(inst) & FLAG_SLOTS:
        return LINE * load_i32(operand(inst, ctx, 8) + LOCATION_BYTES * expert + field)
    return expert * parameter(inst, LINEAR.expert_bytes)


@inline
def part_of(inst, work):
    """The first of the segments that the instruction computes, and the one after the last."""
    first, stop = 0, work.segments
    if flags(inst) & FLAG_SLOTS:
        while first < stop and expert_of(work, first) < parameter(inst, LINEAR.since):
            first += 1
        while stop > first and expert_of(work, stop - 1) >= parameter(inst, LINEAR.until):
            stop -= 1
    return first, stop


@inline
def expert_of(work, s):
    """Expert of segment s."""
    expert, _, _ = segment(work, s)
    return expert


def _register_gated(name, chunk_of):
    @kernel(name)
    def run(inst, ctx, tid, n_threads):
        scratch = operand(inst, ctx, 4) + tid * parameter(inst, LINEAR.scratch)
        work = work_of(inst, ctx, scratch)
        units, chunk = parameter(inst, LINEAR.tiles), parameter(inst, LINEAR.chunk)
        chunks, stride = (units + chunk - 1) // chunk, parameter(inst, LINEAR.out_stride)
        size = 2 * parameter(inst, LINEAR.tile_bytes)
        since, stop = part_of(inst, work)
        number = since * chunks + claim(ctx)
        while number < stop * chunks:
            after = since * chunks + claim(ctx)
            s = number // chunks
            expert, first, n = segment(work, s)
            base, start = expert * units, (number - s * chunks) * chunk
            location, following = location_of(inst, ctx, expert, LOCATION_GATE_UP), base + start
            if after < stop * chunks:
                there = location_of(inst, ctx, expert_of(work, after // chunks), LOCATION_GATE_UP)
                following = base + div_i64(there - location, size) + after % chunks * chunk
            at = Addresses(inst, operand(inst, ctx, 0) + location - base * size, work.x + first * work.stride,
                       operand(inst, ctx, 2) + first * stride - 64 * base, operand(inst, ctx, 3), scratch, 0)
            chunk_of(at, base + start, base + min(start + chunk, units), following, n)
            number = after
        return 0


@outlined
def add_weighted(rows, n, tiles, gap, entries, out, stride):
    """Add `tiles` x n vectors of 16 outputs, times the weights of n entries, to the rows of the entries' tokens.

    In these rows a tile's outputs are `gap` vectors after those of the one before.
    """
    for j in range(n):
        entry = entries + ROUTE_BYTES * j
        to, weight = out + load_i32(entry + ROUTE_TOKEN) * stride, splat_f32(load_f32(entry + ROUTE_WEIGHT))
        for i in range(tiles):
            y = load_f32x16(rows + 64 * (i * n + j))
            store_f32x16(to + 64 * i * gap, fma(weight, y, load_f32x16(to + 64 * i * gap)))


@outlined
def clear(out, rows, stride, tiles):
    """Write zeros to the first 16 x `tiles` values of rows."""
    for t in range(rows):
        for i in range(tiles):
            store_f32x16(out + t * stride + 64 * i, splat_f32(0.0))


def _added(make_matmul, group, n, m):
    """Row tiles for the n entries from t on: matmul, bias, and addition to the tokens' rows."""
    matmul = make_matmul(group, m, n)

    @inline
    def step(at, tile, t, tiles, following, gap):
        inst, stride, size = at.inst, parameter(at.inst, LINEAR.x_stride), parameter(at.inst, LINEAR.tile_bytes)
        base, (pair, pairs) = at.x + t * stride, between(tiles, gap)
        acc = matmul(at.w + tile * size, (size * pair, size * pairs), parameter(inst, LINEAR.records), base, stride,
                      base + n * parameter(inst, LINEAR.x_scales), base + n * parameter(inst, LINEAR.x_offsets),
                      following * size, inst)
        if flags(inst) & FLAG_BIAS:
            acc = add_block(m, acc, at.bias + 64 * tile, 0, (64 * pair, 64 * pairs))
        store_block(1, acc, at.scratch, 64)
        add_weighted(at.scratch, n, tiles, gap, at.entries + ROUTE_BYTES * t, at.out + 64 * tile,
                     parameter(inst, LINEAR.out_stride))

    return m, step


def chunk_added(make_matmul, group):
    """Do `matmul.chunk_of_rows` for rows that are added."""
    return chunk_of(lambda n, m: _added(make_matmul, group, n, m), group)


def _register_down(name, chunk_of):
    @kernel(name)
    def run(inst, ctx, tid, n_threads):
        scratch = operand(inst, ctx, 4) + tid * parameter(inst, LINEAR.scratch)
        work = work_of(inst, ctx, scratch)
        tiles, chunk, size = parameter(inst, LINEAR.tiles), parameter(inst, LINEAR.chunk), \
            parameter(inst, LINEAR.tile_bytes)
        since, stop = part_of(inst, work)
        start = claim(ctx) * chunk
        while start < tiles:
            after = claim(ctx) * chunk
            if not flags(inst) & FLAG_RESIDUAL:
                clear(operand(inst, ctx, 2) + 64 * start, count(ctx, parameter(inst, LINEAR.rows)),
                      parameter(inst, LINEAR.out_stride), min(chunk, tiles - start))
            for s in range(since, stop):
                expert, first, n = segment(work, s)
                base, next_s, next_start = expert * tiles, s + 1, start
                if s + 1 == stop:
                    next_s, next_start = (since, after) if after < tiles else (s, start)
                location = location_of(inst, ctx, expert, LOCATION_DOWN)
                there = location_of(inst, ctx, expert_of(work, next_s), LOCATION_DOWN)
                following = base + div_i64(there - location, size) + next_start
                at = Part(inst, operand(inst, ctx, 0) + location - base * size, work.x + first * work.stride,
                          operand(inst, ctx, 2) - 64 * base, operand(inst, ctx, 3), scratch,
                          work.entries + ROUTE_BYTES * first)
                chunk_of(at, base + start, base + min(start + chunk, tiles), following, n)
            start = after
        return 0


for _suffix, (_make_matmul, _group) in MATMULS.items():
    _register_gated(f"experts_gated_{_suffix}", chunk_of_units(_make_matmul, _group))
    _register_down(f"experts_down_{_suffix}", chunk_added(_make_matmul, _group))
