"""Matrices whose columns are in an order of their own (act-order): which are stored in it, and which are refused."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Graph, RopeHalves, Rows, Source, Weight
from edgeinfer.quant import WeightType

from .kinds import PackedKind

REMEDY = "To requantise all weights and report the error, add --weights q4 (or int8, f16)."
Kinds = Mapping[str, PackedKind | str]


def order_of(kinds: Kinds, source: Source) -> str:
    """Return the order of a tensor's columns by its name; empty if they are in their own order, or codes are not kept.
    """
    kind = kinds.get(source.name)
    return kind.order if isinstance(kind, PackedKind) and kind.held else ""


def _has_codes(kinds: Kinds, source: Source) -> bool:
    kind = kinds.get(source.name)
    return isinstance(kind, PackedKind) and bool(kind.held)


def is_ordered(weight: Weight, part: Sequence[Source], kinds: Kinds, stored: WeightType) -> bool:
    """Return whether the sources of a weight, or of a part of it, are stored with their columns in another order.

    Raises
    ------
    UnsupportedModelError
        They are in several orders, or no operation can reorder the weight's input.
    """
    orders = dict.fromkeys(order_of(kinds, source) for source in part if _has_codes(kinds, source))
    if not any(orders):
        return False
    if len(orders) > 1:
        names = ", ".join(next(source.name for source in part if order_of(kinds, source) == order) for order in orders)
        raise UnsupportedModelError(
            f"The columns of the tensors {names:.200} are in {len(orders)} orders (act-order), and edgeinfer has these "
            f"in one matrix. {REMEDY}")
    movable = all(isinstance(step, RopeHalves | Rows) for source in part for step in source.steps)
    if stored.quantised and weight.kind != "matrix":
        raise _unread(weight.kind, part[0].name)
    return stored.quantised and movable


def refuse_unread(graph: Graph, table: Container[str]) -> None:
    """Refuse a graph that multiplies a matrix whose columns are in another order, and does not know of it."""
    for weight in graph.weights:
        if weight.order_name in table and not weight.ordered:
            raise _unread(weight.kind, weight.sources[0].name)


def _unread(kind: str, name: str) -> UnsupportedModelError:
    what = {"experts": "a matrix of experts", "head": "the output head", "embedding": "the embedding"}
    return UnsupportedModelError(f"{name} is {what.get(kind, 'a matrix')} whose columns are in an order of their own "
                                 f"(act-order), which is not taken as it is there. {REMEDY}")
