"""References of the matmuls of an MoE model's experts, of their inputs, and of the gate of a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import WeightType, layouts

from ...abi import FLAG_BIAS, FLAG_RESIDUAL, q8_row_bytes, unpack_token_tiles
from ...parameters import ACTIVATIONS, EXPERTS_INPUT, LINEAR, ROWS
from ...routes import FLAG_SLOTS, LINE, LOCATION_BYTES, LOCATION_DOWN, LOCATION_GATE_UP
from ..elementwise import quantise_rows
from ..expected import Expected
from ..matmul import gated_values, linear_values
from ..q8 import q8_blocks, read_q8
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of, memory
from .route import Routes, scores_of

Doubles = NDArray[np.float64]


def _source(view: InstructionView) -> tuple[Routes, NDArray[np.float32]]:
    """The list, and the rows of the source in its order."""
    p = view.parameters(EXPERTS_INPUT)
    tokens = view.count(p.rows)
    routes = Routes(view, tokens, p.active, 2, 2)
    width = -(-p.width // 16) * 16
    rows = view.array(0, np.float32, (tokens if p.gather else tokens * p.active, width), (p.in_stride, 4))
    return routes, rows[routes.tokens] if p.gather else rows


def experts_input_f32_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``experts_input_f32``; whole vectors are copied."""
    _, rows = _source(view)
    out = view.array(1, np.float32, rows.shape, (view.parameters(EXPERTS_INPUT).out_stride, 4))
    return [Expected("out", out, rows)]


def experts_input_q8_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``experts_input_q8``: each expert's rows are blocks by themselves."""
    p = view.parameters(EXPERTS_INPUT)
    routes, rows = _source(view)
    padded = np.zeros((len(rows), p.scales), np.float32)
    padded[:, : p.width] = rows[:, : p.width]
    values, scales = quantise_rows(padded, p.group)
    codes, expected = np.rint(values).astype(np.int8), []
    totals = codes.reshape(len(codes), -1, p.group).sum(axis=2, dtype=np.int32)
    for _, part in routes.segments():
        blocks = q8_blocks(view.address(1) + part.start * p.out_stride, part.stop - part.start, p.out_stride, p.scales,
                           p.offsets, p.group, unpack_token_tiles(p.token_tiles))
        for block in blocks:
            here = slice(part.start + block.first, part.start + block.first + len(block.codes))
            expected += [Expected("codes", block.codes, codes[here].reshape(block.codes.shape)),
                         Expected("scales", block.scales, scales[here]),
                         Expected("offsets", block.offsets, -8 * totals[here])]
    return expected


def sigmoid_gate_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``sigmoid_gate``; whole vectors."""
    p = view.parameters(ROWS)
    rows, width = view.count(p.rows), -(-p.width // 16) * 16
    gate = view.array(0, np.float32, (rows, 1), (p.in_stride, 4)).astype(np.float64)
    out = view.array(1, np.float32, (rows, width), (p.out_stride, 4))
    y = out * scores_of(gate, sigmoid=True)
    return [Expected("out", out, y, exact=False, tolerance=TOLERANCES["activation"] * np.abs(out) + TINY)]


def _inputs(view: InstructionView, routes: Routes, group: int, columns: int) -> Doubles:
    """x of each entry of the list, dequantised, padding included."""
    p = view.parameters(LINEAR)
    n = len(routes.experts)
    if not routes.single and not group:
        return view.array(1, np.float32, (n, columns), (p.x_stride, 4)).astype(np.float64)
    if not routes.single:
        _, padded, offsets = q8_row_bytes(columns, group)
        parts = [read_q8(q8_blocks(view.address(1) + part.start * p.x_stride, part.stop - part.start, p.x_stride,
                                   padded, offsets, group, unpack_token_tiles(p.token_tiles)))
                 for _, part in routes.segments()]
        codes, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return codes * np.repeat(scales.astype(np.float64), group, axis=1)
    base = view.address(5)
    rows = np.stack([memory(base + k * p.source_stride, np.float32, (p.width if group else columns,))
                     for k in range(n)])
    if not group:
        return rows.astype(np.float64)
    padded_rows = np.zeros((n, columns), np.float32)
    padded_rows[:, : p.width] = rows
    values, scales = quantise_rows(padded_rows, group)
    return np.rint(values) * np.repeat(scales.astype(np.float64), group, axis=1)


def _weights(view: InstructionView, expert: int, tiles: int, dtype: str, group: int,
             field: int) -> tuple[Doubles, Doubles]:
    """The matrix and the bias of an expert that has this many tiles."""
    p = view.parameters(LINEAR)
    at = expert * p.expert_bytes
    if view.flags & FLAG_SLOTS:
        at = LINE * int(view.array(8, np.int32, (1,), at=LOCATION_BYTES * expert + field)[0])
    rows, columns = layouts.TILE_ROWS * tiles, p.records * WeightType(dtype, group).padded_columns(1)
    data = view.array(0, np.uint8, (tiles * p.tile_bytes,), at=at)
    bias = view.array(3, np.float32, (rows,), at=4 * rows * expert) if view.flags & FLAG_BIAS else np.zeros(rows)
    w = layouts.unpack_tile16(data, dtype, group, (rows, columns), view.stored(dtype, group).levels)
    return w.astype(np.float64), bias.astype(np.float64)


def _operands(view: InstructionView, dtype: str, group: int) -> tuple[Routes, Doubles]:
    p = view.parameters(LINEAR)
    routes = Routes(view, view.count(p.rows), p.active, 6, 7)
    stored = WeightType(dtype, group)
    return routes, _inputs(view, routes, stored.input_group, p.records * stored.padded_columns(1))


def _computed(view: InstructionView, routes: Routes) -> tuple[list[tuple[int, slice]], slice]:
    """The segments that an instruction computes, and the entries that these are."""
    p = view.parameters(LINEAR)
    segments = [(expert, part) for expert, part in routes.segments()
                if not view.flags & FLAG_SLOTS or p.since <= expert < p.until]
    return segments, slice(segments[0][1].start, segments[-1][1].stop) if segments else slice(0, 0)


def experts_gated_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``experts_gated_<dtype>``: a row for each entry of the list."""
    names = {number: name for name, number in ACTIVATIONS.items()}

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(LINEAR)
        routes, x = _operands(view, dtype, group)
        y = np.zeros((len(x), layouts.TILE_ROWS * p.tiles))
        tolerance = np.zeros_like(y)
        segments, computed = _computed(view, routes)
        for expert, part in segments:
            w, bias = _weights(view, expert, 2 * p.tiles, dtype, group, LOCATION_GATE_UP)
            gate, up = w.reshape(p.tiles, 2, layouts.TILE_ROWS, -1).transpose(1, 0, 2, 3).reshape(2, y.shape[1], -1)
            biases = bias.reshape(p.tiles, 2, layouts.TILE_ROWS).transpose(1, 0, 2).reshape(2, -1)
            y[part], tolerance[part] = gated_values(x[part], gate, up, names[p.activation], *biases,
                                                         limit=float_of(p.limit))
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        return [Expected("out", out[computed], y[computed], exact=False, tolerance=tolerance[computed])]

    return reference


def experts_down_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``experts_down_<dtype>``: the weighted outputs of a token's experts, added to its row or to
    0.
    """

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(LINEAR)
        routes, x = _operands(view, dtype, group)
        out = view.array(2, np.float32, (view.count(p.rows), layouts.TILE_ROWS * p.tiles), (p.out_stride, 4))
        y = out.astype(np.float64) if view.flags & FLAG_RESIDUAL else np.zeros(out.shape)
        tolerance = 1e-6 * np.abs(y)
        for expert, part in _computed(view, routes)[0]:
            w, bias = _weights(view, expert, p.tiles, dtype, group, LOCATION_DOWN)
            matmul, near = linear_values(x[part], w, bias)
            weights = routes.weights[part, None]
            np.add.at(y, routes.tokens[part], weights * matmul)
            np.add.at(tolerance, routes.tokens[part], np.abs(weights) * (near + 1e-6 * np.abs(matmul)))
        return [Expected("out", out, y, exact=False, tolerance=tolerance)]

    return reference
