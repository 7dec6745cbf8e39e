"""A range of a model's layers as a graph of its own: one stage of a pipeline over several processes or machines.

The first stage has the operations before the layers (the embedding) and takes token ids; the others take the residual
rows of the stage before. The last has the final norm and the output head; the others end with the residual rows after
their last layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..errors import UnsupportedModelError, UsageError
from .graph import Graph
from .ops.base import Op
from .ops.rows import GivenRows
from .passes import graph_pass
from .tensors import Tensor

LAYER_RANGE = "layer_range"
"""Name of the pass."""


@graph_pass
def layer_range(graph: Graph, first: int, last: int) -> Graph:
    """Keep the layers first .. last and the weights that they read."""
    n = graph.config.num_hidden_layers
    if type(first) is not int or type(last) is not int or not 0 <= first <= last < n:
        raise UsageError(f"layer_range has layers {first!r:.40} to {last!r:.40}; the model has 0 to {n - 1}.")
    if graph.layers is not None:
        raise UsageError("layer_range is applied to a range of layers; apply it once.")
    (start, given), (stop, left) = (cut_before(graph, layer) for layer in (first, last + 1))
    ops: list[Op] = [*([GivenRows(out=given)] if given else []), *graph.ops[start:stop]]
    used = {weight.name for op in ops for weight in op.weights}
    kept = tuple(weight for weight in graph.weights if weight.name in used)
    return replace(graph, ops=tuple(ops), weights=kept, types={name: graph.types[name] for name in used},
                   logits=left or graph.logits, layers=(first, last))


def cut_before(graph: Graph, layer: int) -> tuple[int, Tensor | None]:
    """Return the operation with which a layer begins, and the rows that it takes from those before.

    There are no such rows before the first layer, to which the embedding belongs, and after the last, which the head
    belongs to.

    Raises
    ------
    UnsupportedModelError
        More than the residual rows goes from the layers before to those after.
    """
    n = graph.config.num_hidden_layers
    if layer in (0, n):
        return layer and len(graph.ops), None
    ops = graph.ops
    start = next(i for i, op in enumerate(ops) if op.layer is not None and op.layer >= layer)
    before, after = ops[:start], ops[start:]
    if late := next((op for op in after if op.layer is not None and op.layer < layer), None):
        raise _refusal(graph, layer, f"{late.label} follows operations of later layers")
    stored = {op.kv.layer for op in before if op.kv and op.kv.stores}
    if shared := sorted({op.kv.layer for op in after if op.kv} & stored):
        raise _refusal(graph, layer, f"later layers read the K and V of {_layers(shared)}")
    written = {op.out.name for op in before}
    crossing = {x.name: x for op in after for x in op.inputs if x.name in written}
    if len(crossing) != 1:
        raise _refusal(graph, layer, f"later layers read {' and '.join(sorted(crossing))} of earlier ones")
    (rows,) = crossing.values()
    if (rows.dtype, rows.rows, rows.times) != ("f32", "tokens", 1):
        raise _refusal(graph, layer, f"later layers read {rows}, which is not a residual")
    return start, rows


def _layers(numbers: Iterable[int]) -> str:
    listed = list(map(str, numbers))
    return f"layer{'s' * (len(listed) > 1)} {', '.join(listed)}"


def _refusal(graph: Graph, layer: int, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"The model {graph.config.model_type} cannot be split before layer {layer}: {why}; "
                                 "split it elsewhere, or run it in one process.")
