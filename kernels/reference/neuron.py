"""Twins of the FFN in layout neuron: `neuron_gated_*` is act(x G^T) * (x U^T), `neuron_down_*` is f D^T."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import layouts

from ..abi import (
    COUNT_ACTIVE,
    FLAG_BIAS,
    FLAG_LIST,
    FLAG_RESIDUAL,
    neuron_line_columns,
    neuron_lines,
    q8_row_bytes,
)
from ..parameters import ACTIVATIONS, NEURON_DOWN, NEURON_GATED
from .elementwise import quantised_input
from .expected import Expected
from .linear import gated_reference, linear_reference
from .tolerances import TINY, TOLERANCES
from .view import RecordView, memory

Doubles = NDArray[np.float64]


def _neurons(view: RecordView, neurons: int) -> NDArray[np.int64]:
    """Numbers of the neurons that a record computes."""
    if view.flags & FLAG_LIST:
        return view.array(3, np.int32, (view.count(COUNT_ACTIVE),)).astype(np.int64)
    return np.arange(neurons)


def _parts(view: RecordView, p: Any, dtype: str, numbers: NDArray[np.int64], parts: slice) -> Doubles:
    """Weights of some neurons' parts, dequantised: (neurons, parts, columns with the padding of groups)."""
    data = memory(view.address(0), np.uint8, (p.neurons, 3 * p.part_bytes))[numbers]
    shape = (len(numbers), 3, p.groups * p.group)
    if not len(numbers):
        return np.zeros((0, len(range(3)[parts]), shape[2]))
    return layouts.unpack_neuron(data.reshape(-1), dtype, p.group, shape)[:, parts].astype(np.float64)


def neuron_gated_twin(dtype: str) -> Callable[[RecordView], list[Expected]]:
    """The twin of ``neuron_gated_<dtype>``."""
    names = {number: name for name, number in ACTIVATIONS.items()}

    def twin(view: RecordView) -> list[Expected]:
        p = view.parameters(NEURON_GATED)
        tokens, numbers = view.count(p.rows), _neurons(view, p.neurons)
        weights = _parts(view, p, dtype, numbers, slice(0, 2))
        x, near = quantised_input(view, p, q8_row_bytes(p.groups * p.group, p.group)[1], 7, 8)
        biases = np.zeros((2, p.neurons))
        if view.flags & FLAG_BIAS:
            biases[:] = view.array(5, np.float32, biases.shape)
        gate, up = weights[:, 0], weights[:, 1]
        x, near = x[:, : gate.shape[1]], near[:, : gate.shape[1]]
        y, tolerance = gated_reference(x, gate, up, names[p.activation], *biases[:, numbers], near=near)
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        expected = [Expected("f", out, y, exact=False, tolerance=tolerance)]
        if tokens == 1:
            expected.append(_sums(view, p, dtype, numbers, out, y, tolerance))
        return expected

    return twin


def _sums(view: RecordView, p: Any, dtype: str, numbers: NDArray[np.int64], out: NDArray[np.float32], y: Doubles,
          tolerance: Doubles) -> Expected:
    """Sums of the columns of each block of neurons, by the values that are stored."""
    columns = _parts(view, p, dtype, numbers, slice(2, 3))[:, 0]
    line = neuron_line_columns(dtype)
    width = line * neuron_lines(columns.shape[1], p.group, dtype)
    of_block = np.arange(0, p.neurons, p.block)[:, None] == numbers // p.block * p.block
    where = view.array(6, np.float32, (len(of_block), width))
    largest = np.zeros(where.shape)
    largest[:, : columns.shape[1]] = of_block @ ((np.abs(y) + tolerance).T * np.abs(columns))

    def sums() -> Doubles:
        values = np.zeros(where.shape)
        values[:, : columns.shape[1]] = of_block @ (out.astype(np.float64).T * columns)
        return values

    return Expected("sums", where, sums, exact=False, tolerance=TOLERANCES["linear"] * largest + TINY)


def neuron_down_twin(dtype: str) -> Callable[[RecordView], list[Expected]]:
    """The twin of ``neuron_down_<dtype>``; rows of the output end with a whole vector."""

    def twin(view: RecordView) -> list[Expected]:
        p = view.parameters(NEURON_DOWN)
        tokens, numbers, width = view.count(p.rows), _neurons(view, p.neurons), -(-p.width // 16) * 16
        columns = _parts(view, p, dtype, numbers, slice(2, 3))[:, 0, :width]
        if tokens == 1:
            return [_merged(view, p, dtype, width)]
        f = view.array(1, np.float32, (tokens, len(numbers)), (p.x_stride, 4)).astype(np.float64)
        bias = view.array(5, np.float32, (width,)).astype(np.float64) if view.flags & FLAG_BIAS else 0.0
        y, tolerance = linear_reference(f, columns.T, bias)
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        if view.flags & FLAG_RESIDUAL:
            tolerance += 1e-7 * np.abs(out)
            y += out
        return [Expected("out", out, y, exact=False, tolerance=tolerance)]

    return twin


def _merged(view: RecordView, p: Any, dtype: str, width: int) -> Expected:
    """One token: the sums of blocks are added up."""
    row = neuron_line_columns(dtype) * neuron_lines(p.groups * p.group, p.group, dtype)
    sums = view.array(6, np.float32, (-(-p.neurons // p.block), row))[:, :width].astype(np.float64)
    y, tolerance = sums.sum(axis=0, keepdims=True), TOLERANCES["linear"] * np.abs(sums).sum(axis=0, keepdims=True)
    out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
    if view.flags & FLAG_BIAS:
        y += view.array(5, np.float32, (width,))
        tolerance += 1e-7 * np.abs(y)
    if view.flags & FLAG_RESIDUAL:
        tolerance += 1e-7 * np.abs(out)
        y += out
    return Expected("out", out, y, exact=False, tolerance=tolerance + TINY)
