"""A whole graph to ONNX: what all models share, then each operation."""

from __future__ import annotations

from edgeinfer.graph import Graph

from . import matmul as lowering_matmul  # noqa: F401 (it registers its operations)
from .attention import declare
from .flavour import Flavour
from .lowering import Lowering, check_types, lower


def lower_graph(graph: Graph, flavour: Flavour) -> Lowering:
    """Lower all operations, in order.

    Raises
    ------
    UnsupportedModelError
        An operation has no equivalent in ONNX, or the weights are of a type for which it has no operator.
    """
    check_types(graph)
    at = Lowering(graph, flavour)
    declare(at)
    for op in graph.ops:
        lower(op, at)
    return at
