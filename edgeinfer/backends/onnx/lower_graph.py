"""A whole graph to ONNX: the common parts, then each operation."""

from __future__ import annotations

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Graph

from . import experts, latent, matmul, recurrent, rows  # noqa: F401 (they register their operations)
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
    if any(op.state_bytes for op in graph.ops):
        _check_recurrent(flavour)
    at = Lowering(graph, flavour)
    declare(at)
    for op in graph.ops:
        lower(op, at)
        at.ends.append(len(at.nodes))
    return at


def _check_recurrent(flavour: Flavour) -> None:
    """Refuse flavours that have no place for the state of recurrent layers."""
    if flavour.target == "genai":
        raise UnsupportedModelError("The model keeps a recurrent state, and an export for onnxruntime-genai describes "
                                    "K and V alone, so the model cannot be exported for it; export with --for session.")
    if flavour.attention == "paged":
        raise UnsupportedModelError("The model keeps a recurrent state, which slots hold and pages do not; export with "
                                    "--attention gqa, or run with --kv-layout slots.")
