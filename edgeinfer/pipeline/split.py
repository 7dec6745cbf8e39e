"""Splits of a model's layers into stages: their notation, their validation, and stages that take equal time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Items
from itertools import accumulate

from edgeinfer.errors import UnsupportedModelError, UsageError
from edgeinfer.graph import Graph, cut_before

Split = tuple[tuple[int, int], ...]
"""First and last layer of each stage."""


def parse_split(text: str, graph: Graph) -> Split:
    """Return the stages of a text such as ``0-15,16-31``; a single layer is a number.

    Raises
    ------
    UsageError
        The text is not a list of ranges, or they leave a gap, overlap or are not those of the model.
    UnsupportedModelError
        The model cannot be split there.
    """
    ranges = []
    for part in text.split(","):
        if not (found := re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part, re.ASCII)):
            raise UsageError(f"The split is {text!r:.80}; list the layers of each stage, such as 0-15,16-31, or auto.")
        ranges.append((int(found[1]), int(found[2] or found[1])))
    check_split(tuple(ranges), graph)
    return tuple(ranges)


def check_split(split: Split, graph: Graph) -> None:
    """Raise as `parse_split` for stages that do not follow each other, or between which a model cannot be split."""
    n, wanted = graph.config.num_hidden_layers, 0
    for first, last in split:
        if last < first:
            raise UsageError(f"The stage {first}-{last} of the split ends before it begins; write the lower layer "
                             "first.")
        if last >= n:
            raise UsageError(f"The split names layer {last}; the model has layers 0 to {n - 1}.")
        if first != wanted:
            what = f"has layer {first} twice" if first < wanted else f"leaves out layers {wanted} to {first - 1}"
            raise UsageError(f"The split {what}; each stage begins with the layer after the last of the one before, "
                             "and the first with 0.")
        wanted = last + 1
    if wanted != n:
        raise UsageError(f"The split ends with layer {wanted - 1}; the last layer of the model is {n - 1}.")
    for first, _ in split[1:]:
        cut_before(graph, first)


def layer_costs(graph: Graph) -> list[float]:
    """Return the bytes of weights that a token reads in each layer, the output head's in the last."""
    n = graph.config.num_hidden_layers
    costs = [0.0] * n
    for op in graph.ops:
        costs[n - 1 if op.layer is None else op.layer] += sum(read.token for read in op.reads(graph.types))
    return costs


def layer_sizes(graph: Graph, kv: str, tokens: int) -> list[int]:
    """Return the bytes of weights and KV cache of each layer.

    The embedding is part of the first and the output head part of the last.

    Parameters
    ----------
    graph : Graph
    kv : str
        Type of the KV cache.
    tokens : int
        That it holds.
    """
    n = graph.config.num_hidden_layers
    sizes, counted, in_layers = [0] * n, set[str](), False
    for op in graph.ops:
        in_layers = in_layers or op.layer is not None
        layer = op.layer if op.layer is not None else n - 1 if in_layers else 0
        for weight in op.weights:
            if weight.name not in counted:
                sizes[layer] += graph.types[weight.name].nbytes(weight.shape)
                counted.add(weight.name)
        if op.kv and op.kv.stores:
            sizes[layer] += op.kv.position_bytes(kv) * tokens
    return sizes


def auto_split(graph: Graph, speeds: Items[float], sizes: Items[float] = (), rooms: Items[float] = ()) -> Split:
    """Return the split whose slowest stage is as fast as can be.

    Parameters
    ----------
    graph : Graph
        Of the whole model.
    speeds : of float
        Of each stage's machine, relative to each other, such as bytes of weights per second.
    sizes, rooms : of float, optional
        Bytes of each layer, and of the room of each stage's machine. Where no split fits, the stage with the
        least room too little is chosen, for its plan to say so.

    Raises
    ------
    UsageError
        There are more stages than layers, or a speed is not above 0.
    UnsupportedModelError
        The model has fewer places to be split at.
    """
    n, costs = graph.config.num_hidden_layers, layer_costs(graph)
    if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise UsageError("The speeds of the stages must be finite numbers above 0, one for each stage.")
    if len(speeds) > n:
        raise UsageError(f"{len(speeds)} stages are more than the model's {n} layers; use fewer.")
    ends, fault = _ends(graph)
    before, taken = (_sums(values, n) for values in (costs, sizes))
    found: dict[int, tuple[float, float, Split]] = {0: (0.0, 0.0, ())}
    for speed, room in zip(speeds, rooms or [math.inf] * len(speeds), strict=True):
        longer: dict[int, tuple[float, float, Split]] = {}  # the best way to have given out the first layers
        for start, (lacking, worst, split) in found.items():
            for end in (end for end in ends if end > start):
                way = (max(lacking, taken[end] - taken[start] - room),
                       max(worst, (before[end] - before[start]) / speed), (*split, (start, end - 1)))
                longer[end] = min(way, longer.get(end, way))
        found = longer
    if n not in found:
        raise fault or UsageError(f"The model cannot be split into {len(speeds)} stages; use fewer.")
    return found[n][2]


def _sums(values: Items[float], n: int) -> list[float]:
    """Return the sums of the first 0, 1, ... n values; zeros without values."""
    return [0.0, *accumulate(values or [0.0] * n)]


def _ends(graph: Graph) -> tuple[list[int], UnsupportedModelError | None]:
    """Return the layers before which the model can be split, with their number, and why it cannot elsewhere."""
    n = graph.config.num_hidden_layers
    ends, fault = [n], None
    for layer in range(1, n):
        try:
            cut_before(graph, layer)
            ends.append(layer)
        except UnsupportedModelError as error:
            fault = error
    return ends, fault
