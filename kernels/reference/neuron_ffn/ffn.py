"""References of the FFN in layout neuron: `neuron_gated_*` is act(x G^T) * (x U^T), `neuron_down_*` is f D^T.

Of neurons without a gate the first is act(x G^T), where G has their one row each. With a norm of f columns are
multiplied by f and the norm's weight, and the outputs by 1 / sqrt(mean(f^2) + eps).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import layouts

from ...abi import (
    FLAG_BIAS,
    FLAG_MASK,
    FLAG_NORM_OF_F,
    FLAG_RESIDUAL,
    FLAG_THRESHOLD,
    ROLE_DECODE,
    TOKEN_ROLE,
    neuron_line_columns,
    neuron_lines,
    q8_row_bytes,
)
from ...parameters import ACTIVATIONS, NEURON_DOWN, NEURON_GATED
from ..elementwise import quantised_input
from ..expected import Expected
from ..matmul import ACTIVATION_FUNCTIONS, activated_reference, gated_values, linear_values
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of, memory

Doubles = NDArray[np.float64]


def _chosen(view: InstructionView, p: Any, tokens: int) -> NDArray[np.bool_]:
    """Return a mask of the neurons that each token computes: (tokens, neurons)."""
    chosen = np.ones((tokens, p.neurons), bool)
    if view.flags & FLAG_MASK:
        decoded = view.tokens(TOKEN_ROLE)[:tokens] == ROLE_DECODE
        masks = view.array(3, np.uint8, (tokens, -(-p.neurons // 8)), (p.mask_stride, 1))[decoded]
        chosen[decoded] = np.unpackbits(masks, axis=1, bitorder="little")[:, : p.neurons]
    return chosen


def _parts(view: InstructionView, p: Any, dtype: str, table: int) -> Doubles:
    """Gate rows, up rows and down columns, dequantised: (parts, neurons, columns with the padding of groups).

    There are no up rows where the instruction says so. Cold neurons are in slots, which are the operand after `table`;
    those that are in none are zeros.
    """
    n, hot = 3 - p.ungated, p.neurons - p.cold
    shape, data = (p.neurons, n, p.groups * p.group), memory(view.address(0), np.uint8, (n * hot * p.part_bytes,))
    if p.cold:
        parts = np.zeros((n * p.neurons, p.part_bytes), np.uint8)
        parts[:hot] = data[: hot * p.part_bytes].reshape(-1, p.part_bytes)
        pairs = parts[p.neurons :].reshape(p.neurons, n - 1, -1)
        pairs[:hot] = data[hot * p.part_bytes :].reshape(-1, n - 1, p.part_bytes)
        slot_of = view.array(table, np.int32, (-(-p.neurons // (1 << p.shift)),))
        for neuron in range(hot, p.neurons):
            if (slot := int(slot_of[neuron >> p.shift])) >= 0:
                at = slot * p.cluster_bytes + neuron % (1 << p.shift) * n * p.part_bytes
                own = view.array(table + 1, np.uint8, (n, p.part_bytes), at=at)
                parts[neuron], pairs[neuron] = own[0], own[1:]
        data = parts.reshape(-1)
    return layouts.unpack_neuron(data, dtype, p.group, shape).transpose(1, 0, 2).astype(np.float64)


def _by(view: InstructionView, p: Any, operand: int) -> Doubles:
    """Return the weights of a norm of f; ones where there is none."""
    if not view.flags & FLAG_NORM_OF_F:
        return np.ones(p.neurons)
    return view.array(operand, np.float32, (p.neurons,)).astype(np.float64)


def _factors(view: InstructionView, p: Any, tokens: int) -> Doubles:
    """Return the factors of the outputs of tokens, (tokens, 1)."""
    if not view.flags & FLAG_NORM_OF_F:
        return np.ones((tokens, 1))
    f = view.array(1, np.float32, (tokens, p.neurons), (p.x_stride, 4)).astype(np.float64)
    return 1 / np.sqrt((f**2).mean(axis=1, keepdims=True) + float_of(p.eps))


def neuron_gated_reference(dtype: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``neuron_gated_<dtype>``."""
    names = {number: name for name, number in ACTIVATIONS.items()}

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(NEURON_GATED)
        tokens, (gate, *up, down) = view.count(p.rows), _parts(view, p, dtype, 9)
        x, near = quantised_input(view, p, q8_row_bytes(p.groups * p.group, p.group)[1], 7, 8)
        biases = np.zeros((1 + len(up), p.neurons))
        if view.flags & FLAG_BIAS:
            biases[:] = view.array(5, np.float32, biases.shape)
        x, near = x[:, : gate.shape[1]], near[:, : gate.shape[1]]
        act, limit = names[p.activation], float_of(p.limit)
        y, tolerance = (gated_values(x, gate, up[0], act, biases[0], biases[1], near=near, limit=limit) if up else
                        activated_reference(x, gate, act, biases[0], near=near, limit=limit))
        if view.flags & FLAG_THRESHOLD:
            gates, far = linear_values(x, gate, biases[0], near)
            acted = ACTIVATION_FUNCTIONS[names[p.activation]](gates, float_of(p.limit))
            _cut(view, acted, 1.2 * far + 1e-6, y, tolerance)
        unchosen = ~_chosen(view, p, tokens)
        y[unchosen] = tolerance[unchosen] = 0
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        own = slice(p.before, p.neurons - p.behind)
        expected = [Expected("f", out[:, own], y[:, own], exact=False, tolerance=tolerance[:, own])]
        if tokens == 1:
            expected.append(_sums(view, p, dtype, down * _by(view, p, 11)[:, None], out, y, tolerance))
        return expected

    return reference


def _cut(view: InstructionView, acted: Doubles, far: Doubles, y: Doubles, tolerance: Doubles) -> None:
    """Remove the neurons that the threshold of decoded tokens leaves out; where the gate is too near to say, both are
    right."""
    decoded = (view.tokens(TOKEN_ROLE)[: len(y)] == ROLE_DECODE)[:, None]
    above = np.abs(acted) - float(view.array(3, np.float32, (1,))[0])
    near = decoded & (np.abs(above) <= far)
    tolerance[near] += np.abs(y[near])
    out = decoded & (above <= 0)
    tolerance[out & ~near] = y[out] = 0


def _sums(view: InstructionView, p: Any, dtype: str, columns: Doubles, out: NDArray[np.float32], y: Doubles,
          tolerance: Doubles) -> Expected:
    """Sums of the columns of each block of neurons, by the values that are stored."""
    line = neuron_line_columns(dtype)
    width = line * neuron_lines(columns.shape[1], p.group, dtype)
    of_block = np.arange(0, p.neurons, p.block)[:, None] == np.arange(p.neurons) // p.block * p.block
    where = view.array(6, np.float32, (len(of_block), width))
    largest, own = np.zeros(where.shape), slice(p.before // p.block, -(-(p.neurons - p.behind) // p.block))
    largest[:, : columns.shape[1]] = of_block @ ((np.abs(y) + tolerance).T * np.abs(columns))

    def sums() -> Doubles:
        values = np.zeros(where.shape)
        values[:, : columns.shape[1]] = of_block @ (out.astype(np.float64).T * columns)
        return values[own]

    return Expected("sums", where[own], sums, exact=False, tolerance=TOLERANCES["linear"] * largest[own] + TINY)


def neuron_down_reference(dtype: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``neuron_down_<dtype>``; rows of the output end with a whole vector."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(NEURON_DOWN)
        tokens, width = view.count(p.rows), -(-p.width // 16) * 16
        if tokens == 1:
            return [_merged(view, p, dtype, width)]
        columns = _parts(view, p, dtype, 6)[-1, :, :width]
        f = view.array(1, np.float32, (tokens, p.neurons), (p.x_stride, 4)).astype(np.float64)
        bias = view.array(4, np.float32, (width,)).astype(np.float64) if view.flags & FLAG_BIAS else 0.0
        factors = _factors(view, p, tokens)
        y, tolerance = linear_values(f * _by(view, p, 8) * factors, columns.T, bias)
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        if view.flags & FLAG_RESIDUAL:
            tolerance += 1e-7 * np.abs(out)
            y += out
        return [Expected("out", out, y, exact=False, tolerance=tolerance)]

    return reference


def _merged(view: InstructionView, p: Any, dtype: str, width: int) -> Expected:
    """One token: the sums of blocks are added up."""
    row = neuron_line_columns(dtype) * neuron_lines(p.groups * p.group, p.group, dtype)
    sums = view.array(5, np.float32, (-(-p.neurons // p.block), row))[:, :width] * _factors(view, p, 1)
    y, tolerance = sums.sum(axis=0, keepdims=True), TOLERANCES["linear"] * np.abs(sums).sum(axis=0, keepdims=True)
    out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
    if view.flags & FLAG_BIAS:
        y += view.array(4, np.float32, (width,))
        tolerance += 1e-7 * np.abs(y)
    if view.flags & FLAG_RESIDUAL:
        tolerance += 1e-7 * np.abs(out)
        y += out
    return Expected("out", out, y, exact=False, tolerance=tolerance + TINY)
