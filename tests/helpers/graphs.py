"""Graphs of a small model, and changes of their operations."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.config import Recipe
from edgeinfer.graph import Graph, Op, build_graph, read_config, requested_types
from tests.unit.graph.test_graph import CONFIG

NONE = Recipe(())


def build(recipe: Recipe = NONE, weights: str = "q4", **fields: Any) -> Graph:
    return build_graph(read_config({**CONFIG, **fields}), requested_types(weights), recipe)


def first(graph: Graph, kind: type[Op]) -> int:
    return next(i for i, op in enumerate(graph.ops) if isinstance(op, kind))


def changed(graph: Graph, at: int, **fields: Any) -> Graph:
    ops = list(graph.ops)
    ops[at] = dataclasses.replace(ops[at], **fields)
    return dataclasses.replace(graph, ops=tuple(ops))
