"""Lowering of matmuls and FFNs to ONNX, whole or by neuron."""

from __future__ import annotations

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import ExpertsGated, GatedLinear, Linear, LinearPart, NeuronDown, NeuronGated

from . import weights
from .functions import function, gated
from .lowering import BY_COLUMN, Lowering, lower
from .weights import Part


def _added(y: str, op: Linear | NeuronDown, at: Lowering) -> None:
    """A matmul's bias and residual."""
    if op.bias:
        y = at.biased(y, at.vector(op.bias))
    at.set(op.out, (at.value(op.residual), y) if op.residual else y)


@lower.register
def _(op: Linear, at: Lowering) -> None:
    if op.weight.kind == "router":
        return at.set(op.out, _scores(op, at))
    _added(at.matmul(at.value(op.x), at.whole(op.weight), at.axes_of(op.x)), op, at)


def _scores(op: Linear, at: Lowering) -> str:
    """Logits of experts, or of a gate, in f32 as their weights are: those that are close choose other experts if they
    are rounded."""
    x = at.value(op.x)
    x = x if at.dtype == "f32" else at.node("Cast", x, to="f32")
    y = at.node("MatMul", x, at.store(weights.dense(at.whole(op.weight), "f32")))
    return at.node("Add", y, at.store(weights.vector(op.bias, "f32"))) if op.bias else y


@lower.register
def _(op: LinearPart, at: Lowering) -> None:
    y = at.matmul(at.value(op.x), at.whole(op.weight))
    if op.bias:
        y = at.biased(y, at.vector(op.bias))
    at.set(op.out, at.node("Concat", _up_to(op, at), y, axis=-1) if op.onto else y)


def _up_to(op: LinearPart, at: Lowering) -> str:
    """Return the columns of the parts before, with zeros up to the tile in which this one begins."""
    assert op.onto
    x, before = at.value(op.onto), next(one for one in at.graph.ops if one.out == op.onto)
    assert isinstance(before, LinearPart)
    gap = op.first - before.first - before.weight.shape[0]
    return at.node("Pad", x, at.constant(0, gap), "", at.constant(-1)) if gap else x


def gate_and_up(op: GatedLinear | ExpertsGated, n: int, at: Lowering) -> str:
    """Return act(gate) * up of n rows each, of matrices that alternate by tile."""
    x, stored = at.value(op.x), at.graph.types[op.weight.name]
    parts = []
    for i, which in enumerate(("gate", "up")):
        name = op.weight.name.replace("gate_up", f"{which}_proj")
        part = at.matmul(x, Part(op.weight, stored, n, name, i, 2))
        if op.bias:
            part = at.biased(part, at.store(weights.half_vector(op.bias, i, n, f"{name}_bias", at.dtype)))
        parts.append(part)
    return gated(parts[0], parts[1], op.activation, op.limit, at)


@lower.register
def _(op: GatedLinear, at: Lowering) -> None:
    at.set(op.out, gate_and_up(op, op.out.width, at))


@lower.register
def _(op: NeuronGated, at: Lowering) -> None:
    if op.mask or op.threshold:
        raise UnsupportedModelError(f"The operation {op.label} leaves out neurons, which ONNX cannot express; export "
                                    "the model without that approximation.")
    x, stored, n = at.value(op.x), at.graph.types[op.weight.name], op.out.width
    parts = []
    for i, which in enumerate(("gate", "up") if op.weight.shape[1] == 3 else ("up",)):
        name = f"{op.weight.name}.{which}"
        part = at.quantised(x, weights.gates(op.weight, stored, i, name, at.dtype), op.weight.shape[2])
        if op.bias:
            part = at.biased(part, at.store(weights.vector(op.bias, at.dtype, i * n, n, f"{name}_bias")))
        parts.append(part)
    at.set(op.out, gated(parts[0], parts[1], op.activation, op.limit, at) if len(parts) == 2 else
           function(parts[0], op.activation, op.limit, at))


@lower.register
def _(op: NeuronDown, at: Lowering) -> None:
    stored, (neurons, parts, hidden) = at.graph.types[op.weight.name], op.weight.shape
    matrix = weights.down(op.weight, stored, f"{op.weight.name}.down", at.dtype)
    at.remark(BY_COLUMN, stored.nbytes((neurons, parts, hidden)) // parts, matrix.nbytes)
    f = at.norm(op.f, op.f_norm, op.eps) if op.f_norm else at.value(op.f)
    _added(at.node("MatMul", f, at.store(matrix)), op, at)
