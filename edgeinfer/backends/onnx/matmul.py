"""Lowering of matmuls and FFNs to ONNX, whole or by neuron."""

from __future__ import annotations

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import GatedLinear, Linear, LinearPart, NeuronDown, NeuronGated

from . import weights
from .lowering import Lowering, lower
from .weights import Part


def _activated(gate: str, up: str, activation: str, at: Lowering) -> str:
    """act(gate) * up."""
    if activation == "silu":
        gate = at.node("Mul", gate, at.node("Sigmoid", gate))
    elif activation in ("relu", "relu2"):
        gate = at.node("Relu", gate)
        gate = at.node("Mul", gate, gate) if activation == "relu2" else gate
    elif activation in ("gelu", "gelu_tanh"):
        gate = at.node("Gelu", gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        raise UnsupportedModelError(f"The activation {activation} has no equivalent in ONNX, so the model cannot be "
                                    "exported; run it with --device cpu.")
    return at.node("Mul", gate, up)


def _added(y: str, op: Linear | NeuronDown, at: Lowering) -> None:
    """A matmul's bias and residual."""
    if op.bias:
        y = at.biased(y, at.vector(op.bias))
    at.set(op.out, (at.value(op.residual), y) if op.residual else y)


@lower.register
def _(op: Linear, at: Lowering) -> None:
    _added(at.matmul(at.value(op.x), at.whole(op.weight)), op, at)


@lower.register
def _(op: LinearPart, at: Lowering) -> None:
    y = at.matmul(at.value(op.x), at.whole(op.weight))
    if op.bias:
        y = at.biased(y, at.vector(op.bias))
    at.set(op.out, at.node("Concat", at.value(op.onto), y, axis=-1) if op.onto else y)


@lower.register
def _(op: GatedLinear, at: Lowering) -> None:
    x, stored, n = at.value(op.x), at.graph.types[op.weight.name], op.out.width
    parts = []
    for i, which in enumerate(("gate", "up")):
        name = op.weight.name.replace("gate_up", which)
        part = at.matmul(x, Part(op.weight, stored, n, name, i, 2))
        if op.bias:
            part = at.biased(part, at.store(weights.half_vector(op.bias, i, n, f"{name}_bias", at.dtype)))
        parts.append(part)
    at.set(op.out, _activated(parts[0], parts[1], op.activation, at))


@lower.register
def _(op: NeuronGated, at: Lowering) -> None:
    if op.mask or op.threshold:
        raise UnsupportedModelError(f"The operation {op.label} leaves out neurons, which ONNX cannot express; export "
                                    "the model without that approximation.")
    x, stored, n = at.value(op.x), at.graph.types[op.weight.name], op.out.width
    parts = []
    for i, which in enumerate(("gate", "up")):
        name = op.weight.name.removesuffix("ffn") + which
        part = at.quantised(x, weights.gates(op.weight, stored, i, name, at.dtype), op.weight.shape[2])
        if op.bias:
            part = at.biased(part, at.store(weights.vector(op.bias, at.dtype, i * n, n, f"{name}_bias")))
        parts.append(part)
    at.set(op.out, _activated(parts[0], parts[1], op.activation, at))


@lower.register
def _(op: NeuronDown, at: Lowering) -> None:
    stored = at.graph.types[op.weight.name]
    matrix = weights.down(op.weight, stored, op.weight.name.removesuffix("ffn") + "down", at.dtype)
    at.rounded.append(matrix.name)
    _added(at.node("MatMul", at.value(op.f), at.store(matrix)), op, at)
