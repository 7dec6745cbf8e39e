"""Lowering of mixtures of experts to ONNX: matmuls with the matrices of all experts, weighted by the router.

Experts that a token does not go through have the weight 0. Their matrices are stacked for inputs and
side by side for outputs, so that a layer has three matmuls, however many experts there are; they read all
experts for every token.
"""

from __future__ import annotations

from edgeinfer.graph import ExpertsDown, ExpertsGated, ExpertsInput, Route, SortRoutes

from . import stacks, weights
from .lowering import Lowering, lower
from .matmul import gate_and_up
from .stacks import Stack


@lower.register
def _(op: Route, at: Lowering) -> None:
    """Weights of all experts, (..., experts), computed in f32; each operator here has a CUDA kernel for it."""
    logits = at.value(op.logits)
    scores = at.node("Softmax", logits, axis=-1) if op.scores == "softmax" else at.node("Sigmoid", logits)
    values = at.node("Add", scores, at.store(weights.vector(op.bias, "f32"))) if op.bias else scores
    ids = f"experts.{len(at.nodes)}"
    at.node("TopK", _open(op, values, at), at.constant(op.active), axis=-1, out=("", ids))
    chosen = at.node("GatherElements", scores, ids, axis=at.axes)
    if op.normalise:
        chosen = at.node("Div", chosen, at.node("ReduceSum", chosen, at.constant(-1)))
    if op.factors:
        chosen = at.node("Mul", chosen, at.node("Gather", at.store(weights.vector(op.factors, "f32")), ids))
    if op.scale != 1:
        chosen = at.node("Mul", chosen, at.number(op.scale, "f32"))
    none = at.node("Mul", scores, at.number(0.0, "f32"))
    whole = at.node("ScatterElements", none, ids, chosen, axis=at.axes)
    at.routes[op.out.name] = whole if at.dtype == "f32" else at.node("Cast", whole, to=at.dtype)


def _open(op: Route, values: str, at: Lowering) -> str:
    """Return the values by which experts are chosen: -inf outside of the groups that are chosen first."""
    if op.groups == op.active_groups:
        return values
    split = at.node("Reshape", values, at.constant(*at.rows(op.groups, op.experts // op.groups)))
    best = at.node("TopK", split, at.constant(op.group_best), axis=-1, out=("", f"best.{len(at.nodes)}"))
    worth, ids = at.node("ReduceSum", best, at.constant(-1), keepdims=0), f"groups.{len(at.nodes)}"
    top = at.node("TopK", worth, at.constant(op.active_groups), axis=-1, out=("", ids))
    closed = at.node("Sub", at.node("Mul", worth, at.number(0.0, "f32")), at.number(float("inf"), "f32"))
    added = at.node("ScatterElements", closed, ids, at.node("Mul", top, at.number(0.0, "f32")), axis=at.axes)
    split = at.node("Add", split, at.node("Unsqueeze", added, at.constant(-1)))
    return at.node("Reshape", split, at.constant(*at.rows(op.experts)))


@lower.register
def _(op: SortRoutes, at: Lowering) -> None:
    at.routes[op.out.name] = at.routes[op.routes.name]


@lower.register
def _(op: ExpertsInput, at: Lowering) -> None:
    """Every expert gets every token."""
    at.same(op.out, op.x)


@lower.register
def _(op: ExpertsGated, at: Lowering) -> None:
    """Inner values of all experts, (..., experts, rows with those of padding), times their weights."""
    at.notes[f"Each token is multiplied by the matrices of all {op.experts} experts of a layer, of which it goes "
             f"through {op.active}: decoding reads all of them."] = None
    f = gate_and_up(op, op.experts * op.rows, at)
    f = at.node("Reshape", f, at.constant(*at.rows(op.experts, op.rows)))
    routes = at.node("Unsqueeze", at.routes[op.routes.name], at.constant(-1))
    chosen = at.node("Greater", routes, at.number(0.0))  # values of others may be infinite, and infinity times 0 is nan
    at.set(op.out, at.node("Where", chosen, at.node("Mul", f, routes), at.number(0.0)))


@lower.register
def _(op: ExpertsDown, at: Lowering) -> None:
    stored, columns = at.graph.types[op.weight.name], op.weight.shape[1]
    width = -(-columns // (stored.group_size or 1)) * (stored.group_size or 1)
    f, have = at.value(op.x), -(-op.x.width // 16) * 16
    if width > have:
        f = at.node("Pad", f, at.constant(0, width - have), "", at.constant(-1))
    elif width < have:
        f = at.node("Slice", f, at.constant(0), at.constant(width), at.constant(-1))
    f = at.node("Reshape", f, at.constant(*at.rows(op.experts * width)))
    stack = Stack(at.whole(op.weight), op.experts, op.out.width)
    if stored.quantised:
        matrix = at.kept_codes(stored, stacks.beside(stack, at.dtype))
        y = at.quantised(f, matrix, op.experts * width)
    else:
        y = at.node("MatMul", f, at.store(stacks.dense_beside(stack, at.dtype)))
    if op.bias:
        bias = at.store(stacks.expert_vectors(op.bias, op.experts, op.out.width, at.dtype))
        y = at.node("Add", y, at.node("MatMul", at.routes[op.routes.name], bias))
    at.set(op.out, (at.value(op.residual), y) if op.residual else y)
