"""Checker that runs after every pass and reports errors in a graph before it is planned or run."""

from __future__ import annotations

from edgeinfer.kernels import catalogue

from ..config import KV_TYPES
from ..errors import UnsupportedModelError
from .graph import Graph
from .ops.base import COSTS, Op
from .ops.matmul import MatMul
from .tensors import Tensor, Types
from .weights import Weight


def check(graph: Graph, after: str = "the architecture") -> Graph:
    """Return the graph, unless something in it does not fit together.

    Every tensor is written once, before it is read, and read as it was written; an operation writes over an input only
    as its last reader; weights are in the graph's table; widths and types agree; work that a pass of one token leaves
    out is done by its reader.

    Raises
    ------
    UnsupportedModelError
        Naming the operation and its error, and `after` which pass.
    """
    written: dict[str, Tensor] = {}
    left_out: set[str] = set()
    gone: dict[str, Op] = {}
    known = {weight.name: weight for weight in graph.weights}
    for op in graph.ops:
        faults = [*_unknown(op, graph.types, known), *_unwritten(op, written, gone), *op.faults(graph.types)]
        source = op.source if isinstance(op, MatMul) else None
        faults += [f"{x} is left out for one token, and it has no source to make it from"
                   for x in op.inputs if x.name in left_out and source is None and not op.several]
        if op.out.name in written:
            faults.append(f"{op.out.name} is written twice")
        if faults:
            raise UnsupportedModelError(f"After {after}, the operation {op.label} does not fit: {faults[0]}.")
        written[op.out.name] = op.out
        if op.several:
            left_out.add(op.out.name)
        if op.over:
            gone[op.over.name] = op
    if written.get(graph.logits.name) != graph.logits:
        raise UnsupportedModelError(f"After {after}, nothing writes the logits, {graph.logits}.")
    return graph


def _unknown(op: Op, types: Types, known: dict[str, Weight]) -> list[str]:
    return [f"the weight {weight.name} is not in the graph's table" for weight in op.weights
            if weight.name not in types or ((there := known.get(weight.name)) is not weight and there != weight)]


def _unwritten(op: Op, written: dict[str, Tensor], gone: dict[str, Op]) -> list[str]:
    faults = []
    for x in op.inputs:
        if x.name not in written:
            faults.append(f"it reads {x.name} before it is written")
        elif written[x.name] != x:
            faults.append(f"it reads {x}, but {written[x.name]} was written")
        if x.name in gone:
            faults.append(f"it reads {x.name}, which {gone[x.name].label} has overwritten")
    if op.over and (op.over.width, op.over.dtype, op.over.rows) != (op.out.width, op.out.dtype, op.out.rows):
        faults.append(f"it writes {op.out} over {op.over}")
    return faults


def check_runnable(graph: Graph) -> Graph:
    """Return the graph, unless an operation lacks a cost, a kernel or a reference.

    Raises
    ------
    UnsupportedModelError
        Naming the operation and the missing part.
    """
    for kind in dict.fromkeys(type(op) for op in graph.ops):
        for cost in COSTS:
            if getattr(kind, cost) is getattr(Op, cost) and not (cost == "kernels" and kind.KERNELS is not None):
                op = next(op for op in graph.ops if type(op) is kind)
                raise UnsupportedModelError(f"The operation {op.name} has no {cost}(), so it cannot be planned.")
    seen: set[tuple[str, ...]] = set()
    for op in graph.ops:
        names = tuple([name for kv in KV_TYPES for name in op.kernels(graph.types, kv)])
        if names in seen:
            continue
        seen.add(names)
        if not names and not op.given:
            raise UnsupportedModelError(f"The operation {op.label} has no kernel yet, so edgeinfer cannot run it.")
        for name in names:
            if not catalogue.is_known(name):
                raise UnsupportedModelError(f"The operation {op.label} needs the kernel {name}, which does not exist.")
            if not catalogue.has_reference(name):
                raise UnsupportedModelError(f"The kernel {name} of the operation {op.label} has no NumPy reference.")
    return graph
