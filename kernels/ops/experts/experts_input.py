"""Rows of activations in the order in which experts take them: by expert, as `sort_routes` lists them.

Each expert's rows go through register blocks by themselves, so quantised rows are interleaved within a segment of the
list (abi.token_blocks), and a row has the codes that it would have alone. A pass of one token has no such instructions:
the matmuls quantise its row themselves. `sigmoid_gate` is the weight of a shared expert's output.

Operands: 0 source, 1 out, 2 list. Parameters: parameters.EXPERTS_INPUT. Reference: reference/experts/experts.py.
"""

from __future__ import annotations

from ...parameters import EXPERTS_INPUT, ROWS
from ...registry import kernel
from ...routes import ROUTE_BYTES, ROUTE_SEGMENTS, ROUTE_TOKEN, SEGMENT_COUNT, SEGMENT_FIRST
from ...vector.instruction import claim, count, inline, operand, parameter
from ...vector.lanes import splat_f32
from ...vector.memory import load_f32, load_f32x16, load_i32, store_f32x16
from ...vector.vecmath import sigmoid
from ..elementwise import block, n_blocks, quantise_row


@inline
def source_row(inst, source, entries, position):
    """Address of the row that an entry of the list takes."""
    number = load_i32(entries + ROUTE_BYTES * position + ROUTE_TOKEN) if parameter(inst, EXPERTS_INPUT.gather) \
        else position
    return source + number * parameter(inst, EXPERTS_INPUT.in_stride)


@kernel("experts_input_q8")
def experts_input_q8(inst, ctx, tid, n_threads):
    """f32 rows to q8 rows, in blocks of each segment; a segment belongs to one thread."""
    source, out, entries = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    pairs = count(ctx, parameter(inst, EXPERTS_INPUT.rows)) * parameter(inst, EXPERTS_INPUT.active)
    s = claim(ctx)
    while s < load_i32(entries + ROUTE_SEGMENTS):
        segment = entries + ROUTE_BYTES * (pairs + s)
        start, rows = load_i32(segment + SEGMENT_FIRST), load_i32(segment + SEGMENT_COUNT)
        for unit in range(n_blocks(rows)):
            first, n = block(unit, start, rows)
            base = out + first * parameter(inst, EXPERTS_INPUT.out_stride)
            for j in range(n):
                quantise_row(source_row(inst, source, entries, first + j), base, j, n,
                             parameter(inst, EXPERTS_INPUT.width), parameter(inst, EXPERTS_INPUT.group),
                             parameter(inst, EXPERTS_INPUT.scales), parameter(inst, EXPERTS_INPUT.offsets))
        s = claim(ctx)
    return 0


@kernel("experts_input_f32")
def experts_input_f32(inst, ctx, tid, n_threads):
    """f32 rows as they are, whole vectors."""
    source, out, entries = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    pairs = count(ctx, parameter(inst, EXPERTS_INPUT.rows)) * parameter(inst, EXPERTS_INPUT.active)
    p = claim(ctx)
    while p < pairs:
        row, to = source_row(inst, source, entries, p), out + p * parameter(inst, EXPERTS_INPUT.out_stride)
        for i in range(0, parameter(inst, EXPERTS_INPUT.width), 16):
            store_f32x16(to + 4 * i, load_f32x16(row + 4 * i))
        p = claim(ctx)
    return 0


@kernel("sigmoid_gate")
def sigmoid_gate(inst, ctx, tid, n_threads):
    """out = out * sigmoid(the one value of the token's row of the source); whole vectors. Parameters: ROWS."""
    source, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    t = claim(ctx)
    while t < rows:
        share = sigmoid(splat_f32(load_f32(source + t * parameter(inst, ROWS.in_stride))))
        row = out + t * parameter(inst, ROWS.out_stride)
        for i in range(0, parameter(inst, ROWS.width), 16):
            store_f32x16(row + 4 * i, load_f32x16(row + 4 * i) * share)
        t = claim(ctx)
    return 0
