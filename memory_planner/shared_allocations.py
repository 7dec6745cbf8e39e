"""Weights that share an allocation: the matrices of a layer's experts, stored expert by expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from edgeinfer.graph import Graph

from .lifetimes import Placement


def allocation_bytes(graph: Graph) -> dict[str, int]:
    """Bytes of the allocation that each weight begins: its own, of several that share one all, then none."""
    found: dict[str, int] = {}
    strides, filled = graph.strides, 0
    for weight in graph.weights:
        nbytes, stride = graph.stored_bytes[weight.name], strides.get(weight.name, 0)
        found[weight.name] = (0 if filled else weight.pieces * stride) if weight.pieces else nbytes
        filled = (filled + nbytes // weight.pieces) % stride if weight.pieces else 0
    return found


def settle(graph: Graph, allocations: dict[str, Placement]) -> None:
    """Put weights that share an allocation after the first of these, as far as in their file."""
    strides, first, offset = graph.strides, "", 0
    for weight in graph.weights:
        if not weight.pieces:
            continue
        stride, allocation = strides[weight.name], allocations[weight.name]
        first = first if offset else weight.name
        allocations[weight.name] = replace(allocation, offset=allocations[first].offset + offset, stride=stride)
        offset = (offset + allocation.nbytes // weight.pieces) % stride


def extents(allocations: Mapping[str, Placement], names: Iterable[str]) -> dict[str, int]:
    """Return the weights that are read at once: the first of the weights that share an allocation, and the bytes of all
    these."""
    found: dict[str, int] = {}
    for name in names:
        allocation = allocations[name]
        first = name if not allocation.stride else next(
            (other for other in found if 0 < allocation.offset
             - allocations[other].offset < allocations[other].stride), name)
        found[first] = found.get(first, 0) + allocation.nbytes
    return found
