"""Splits of a model's layers into stages: their notation, their validation, and stages that take equal time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Items

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


def auto_split(graph: Graph, speeds: Items[float]) -> Split:
    """Return the split whose slowest stage is as fast as can be.

    Parameters
    ----------
    graph : Graph
        Of the whole model.
    speeds : of float
        Of each stage's machine, relative to each other, such as bytes of weights per second.

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
    ends, fault = [n], None
    for layer in range(1, n):
        try:
            cut_before(graph, layer)
            ends.append(layer)
        except UnsupportedModelError as error:
            fault = error
    before = [sum(costs[:layer]) for layer in range(n + 1)]
    found: dict[int, tuple[float, Split]] = {0: (0.0, ())}
    for speed in speeds:  # the best way to have given out the first layers to the stages so far
        found = {end: min((max(worst, (before[end] - before[start]) / speed), (*split, (start, end - 1)))
                          for start, (worst, split) in found.items() if start < end)
                 for end in ends if any(start < end for start in found)}
    if n not in found:
        raise fault or UsageError(f"The model cannot be split into {len(speeds)} stages; use fewer.")
    return found[n][1]
