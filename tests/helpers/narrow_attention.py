"""A technique that approximates: attention that sees fewer positions, by the kernels that there are."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.graph import Attention, Graph, approximate, graph_pass


@approximate(when=lambda settings: bool(settings.get("window")))
@graph_pass
def narrow(graph: Graph, window: int = 0) -> Graph:
    """Let each token see only the last `window` positions; 0 changes nothing."""
    ops = tuple(replace(op, window=window) if window and isinstance(op, Attention) else op for op in graph.ops)
    return replace(graph, ops=ops)
