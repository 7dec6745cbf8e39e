"""Rows of activations in the order in which experts take them: by expert, as `sort_routes` lists them.

Each expert's rows go through register blocks by themselves, so quantised rows are interleaved within a segment of the
list (abi.token_blocks), and a row has the codes that it would have alone. A pass of one token has no such instructions:
the products quantise its row themselves. `sigmoid_gate` is what a shared expert's output is weighted by.

Operands: 0 source, 1 out, 2 list. Parameters: parameters.EXPERTS_INPUT. Reference: reference/experts/experts.py.
"""

from __future__ import annotations

from ...parameters import EXPERTS_INPUT, ROWS
from ...registry import kernel
from ...routes import ROUTE_BYTES, ROUTE_SEGMENTS, ROUTE_TOKEN, SEGMENT_COUNT, SEGMENT_FIRST
from ...vector.lanes import splat_f32
from ...vector.memory import load_f32, load_f32x16, load_i32, store_f32x16
from ...vector.record import claim, count, inline, operand, parameter
from ...vector.vecmath import sigmoid
from ..elementwise import block, n_blocks, quantise_row


@inline
def source_row(rec, source, entries, position):
    """Address of the row that an entry of the list takes."""
    number = load_i32(entries + ROUTE_BYTES * position + ROUTE_TOKEN) if parameter(rec, EXPERTS_INPUT.gather) \
        else position
    return source + number * parameter(rec, EXPERTS_INPUT.in_stride)


@kernel("experts_input_q8")
def experts_input_q8(rec, ctx, tid, n_threads):
    """f32 rows to q8 rows, in blocks of each segment; a segment belongs to one thread."""
    source, out, entries = operand(rec, ctx, 0), operand(rec, ctx, 1), operand(rec, ctx, 2)
    pairs = count(ctx, parameter(rec, EXPERTS_INPUT.rows)) * parameter(rec, EXPERTS_INPUT.active)
    s = claim(ctx)
    while s < load_i32(entries + ROUTE_SEGMENTS):
        segment = entries + ROUTE_BYTES * (pairs + s)
        start, rows = load_i32(segment + SEGMENT_FIRST), load_i32(segment + SEGMENT_COUNT)
        for unit in range(n_blocks(rows)):
            first, n = block(unit, start, rows)
            base = out + first * parameter(rec, EXPERTS_INPUT.out_stride)
            for j in range(n):
                quantise_row(source_row(rec, source, entries, first + j), base, j, n,
                             parameter(rec, EXPERTS_INPUT.width), parameter(rec, EXPERTS_INPUT.group),
                             parameter(rec, EXPERTS_INPUT.scales), parameter(rec, EXPERTS_INPUT.offsets))
        s = claim(ctx)
    return 0


@kernel("experts_input_f32")
def experts_input_f32(rec, ctx, tid, n_threads):
    """f32 rows as they are, whole vectors."""
    source, out, entries = operand(rec, ctx, 0), operand(rec, ctx, 1), operand(rec, ctx, 2)
    pairs = count(ctx, parameter(rec, EXPERTS_INPUT.rows)) * parameter(rec, EXPERTS_INPUT.active)
    p = claim(ctx)
    while p < pairs:
        row, to = source_row(rec, source, entries, p), out + p * parameter(rec, EXPERTS_INPUT.out_stride)
        for i in range(0, parameter(rec, EXPERTS_INPUT.width), 16):
            store_f32x16(to + 4 * i, load_f32x16(row + 4 * i))
        p = claim(ctx)
    return 0


@kernel("sigmoid_gate")
def sigmoid_gate(rec, ctx, tid, n_threads):
    """out = out * sigmoid(the one value of the token's row of the source); whole vectors. Parameters: ROWS."""
    source, out, rows = operand(rec, ctx, 0), operand(rec, ctx, 1), count(ctx, parameter(rec, ROWS.rows))
    t = claim(ctx)
    while t < rows:
        share = sigmoid(splat_f32(load_f32(source + t * parameter(rec, ROWS.in_stride))))
        row = out + t * parameter(rec, ROWS.out_stride)
        for i in range(0, parameter(rec, ROWS.width), 16):
            store_f32x16(row + 4 * i, load_f32x16(row + 4 * i) * share)
        t = claim(ctx)
    return 0
