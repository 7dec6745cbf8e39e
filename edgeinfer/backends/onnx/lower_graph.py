"""A whole graph to ONNX: the common parts, then each operation."""

from __future__ import annotations

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Graph

from . import experts, latent, matmul, rows  # noqa: F401 (they register their operations)
from .attention import declare
from .flavour import Flavour
from .lowering import Lowering, lower


def lower_graph(graph: Graph, flavour: Flavour) -> Lowering:
    """Lower all operations, in order.

    Raises
    ------
    UnsupportedModelError
        An operation has no equivalent in ONNX.
    """
    if recurrent := next((op for op in graph.ops if op.state_bytes), None):
        raise UnsupportedModelError(f"The operation {recurrent.label} keeps a recurrent state, and the slots and pages "
                                    "of this backend hold K and V alone, so the model cannot be exported; run it with "
                                    "--device cpu.")
    at = Lowering(graph, flavour)
    declare(at)
    for op in graph.ops:
        lower(op, at)
    return at
