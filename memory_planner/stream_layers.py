"""Choice of the layers that stay in memory; the others are read again for every pass, if the budget does not hold all.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.graph import Graph

from .plan import STREAM_BUFFERS, MemoryPlan, Request
from .planner import Planner
from .pool_budget import within
from .request import in_memory


def stream(planner: Planner, request: Request, budget: int) -> MemoryPlan | None:
    """Plan with the fewest streamed layers that the budget allows; None if even all of them are not enough.

    Weights that are not streamed are in memory of the process: pages of a mapped file would be taken away by the system
    just when memory is short, and read again one by one. Embedding, head and vectors are never streamed. Default
    checkpoints of recurrent state take only memory that is left then.
    """
    layers = _layers(planner.graph)
    request = in_memory(request)

    def of(n: int) -> MemoryPlan | None:
        return within(planner, _streaming(request, layers, n), budget)

    low, high = STREAM_BUFFERS + 1, len(layers)  # fewer would take the place that they are to give
    if high < low or of(high) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        if of(middle):
            high = middle
        else:
            low = middle + 1
    return of(high)


def _layers(graph: Graph) -> list[list[str]]:
    """Return the matrices of each layer that no operation outside it reads."""
    readers: dict[str, set[int | None]] = {}
    for op in graph.ops:
        for weight in op.weights:
            if weight.kind != "vector":
                readers.setdefault(weight.name, set()).add(op.layer)
    layers: dict[int, list[str]] = {}
    for name, of in readers.items():
        if len(of) == 1 and (layer := next(iter(of))) is not None:
            layers.setdefault(layer, []).append(name)
    return list(layers.values())


def _streaming(request: Request, layers: list[list[str]], n: int) -> Request:
    """Return the request with n streamed layers at equal distances, so that reads overlap with the others' computation.
    """
    chosen = [layers[(2 * i + 1) * len(layers) // (2 * n)] for i in range(n)]
    residency = (*request.residency, *((name, "streamed") for names in chosen for name in names))
    return replace(request, residency=residency)
