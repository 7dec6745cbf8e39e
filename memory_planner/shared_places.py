"""Weights that share a place: the matrices of a layer's experts, which lie expert by expert beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from edgeinfer.graph import Graph

from .lifetimes import Placement


def place_bytes(graph: Graph) -> dict[str, int]:
    """Bytes of the place that each weight begins: its own, of several that share one all, then none."""
    found: dict[str, int] = {}
    strides, filled = graph.strides, 0
    for weight in graph.weights:
        nbytes, stride = graph.types[weight.name].nbytes(weight.shape), strides.get(weight.name, 0)
        found[weight.name] = (0 if filled else weight.pieces * stride) if weight.pieces else nbytes
        filled = (filled + nbytes // weight.pieces) % stride if weight.pieces else 0
    return found


def settle(graph: Graph, places: dict[str, Placement]) -> None:
    """Put weights that share a place behind the first of these, as far as in their file."""
    strides, first, behind = graph.strides, "", 0
    for weight in graph.weights:
        if not weight.pieces:
            continue
        stride, place = strides[weight.name], places[weight.name]
        first = first if behind else weight.name
        places[weight.name] = replace(place, offset=places[first].offset + behind, stride=stride)
        behind = (behind + place.nbytes // weight.pieces) % stride


def extents(places: Mapping[str, Placement], names: Iterable[str]) -> dict[str, int]:
    """Return what can be read at once: the first of the weights that share a place, and the bytes of all these."""
    found: dict[str, int] = {}
    for name in names:
        place = places[name]
        first = name if not place.stride else next(
            (other for other in found if 0 < place.offset - places[other].offset < places[other].stride), name)
        found[first] = found.get(first, 0) + place.nbytes
    return found
