"""Passes: functions from graph to graph. A recipe names those of a run, and `build_graph` applies them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

from ..base.validation import similar
from ..config import Recipe, Step
from ..errors import UnsupportedModelError, UsageError
from ..registry import technique, techniques
from .check import check
from .graph import Graph
from .ops.base import Op
from .ops.matmul import MatMul
from .ops.rows import Quantize, RmsNorm
from .tensors import Tensor

Pass = Callable[..., Graph]
"""``f(graph, **settings) -> Graph``."""
PASSES: dict[str, Pass] = {}
"""Passes by the name that recipes call them; techniques bring theirs themselves."""
APPROXIMATE: dict[str, Callable[[dict[str, str | float]], bool]] = {}
"""Passes after which a model's predictions may differ; each with a function of its settings, true if they do."""


def graph_pass(function: Pass) -> Pass:
    """Register a pass under the function's name."""
    if function.__name__ in PASSES:
        raise ValueError(f"Two passes are named {function.__name__!r}.")
    PASSES[function.__name__] = function
    return function


def approximate(when: Callable[[dict[str, str | float]], bool] = lambda settings: True) -> Callable[[Pass], Pass]:
    """Say of a pass that it approximates, with all settings or `when` they are such; it is above `graph_pass`."""

    def mark(function: Pass) -> Pass:
        APPROXIMATE[function.__name__] = when
        return function

    return mark


def without_approximations(recipe: Recipe) -> Recipe:
    """Return the recipe without its approximate steps: the rest gives the model's own predictions."""
    return Recipe(tuple(step for step in recipe.steps if not approximates(step)))


def approximates(step: Step) -> bool:
    """Return whether a step of a recipe changes a model's predictions; raises `UsageError` for one that does not
    exist."""
    _pass(step.name)
    own, settings = step.name.rpartition(".")[2], dict(step.settings)
    if own in PASSES:
        return own in APPROXIMATE and APPROXIMATE[own](settings)
    one = technique(own)
    return one is not None and not one.exact(settings)


def apply(graph: Graph, recipe: Recipe) -> Graph:
    """Apply the passes of a recipe in order, each followed by the checker; without any, check the graph itself.

    Raises
    ------
    UsageError
        For a pass that does not exist, or a setting that it does not have.
    UnsupportedModelError
        A pass made a graph that does not fit together.
    """
    if not recipe.steps:
        return check(graph)
    own = graph
    for step in recipe.steps:
        function, settings = _pass(step.name), dict(step.settings)
        try:
            inspect.signature(function).bind(graph, **settings)
        except TypeError as error:
            raise UsageError(f"The pass {step} cannot be applied: {error}.") from None
        made = function(graph, **settings)
        if not isinstance(made, Graph):
            raise UnsupportedModelError(f"The pass {step.name} returns no graph, but {made!r:.60}.")
        try:
            graph = check(made, f"the pass {step.name}")
        except UnsupportedModelError:
            check(own)  # which says so if the architecture's graph did not fit before
            raise
    return graph


def _pass(name: str) -> Pass:
    """Find a pass by its name; the module that is before it, if one does, is imported and registers it."""
    module, _, own = name.rpartition(".")
    if module:
        try:
            import_module(module)
        except ImportError as error:
            raise UsageError(f"The recipe names the pass {name!r}, whose module cannot be imported: {error}.") from None
    if own in PASSES:
        return PASSES[own]
    if (one := technique(own)) and one.rewrite:
        return one.rewrite
    known = [*PASSES, *(one.name for one in techniques() if one.rewrite)]
    near = similar(own, known)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
    raise UsageError(f"The recipe names the pass {name!r}, which does not exist; {hint}")


def insert_after(graph: Graph, found: Callable[[Op], bool], make: Callable[[Op], Op]) -> Graph:
    """Insert an operation after each that is `found`; later readers of its output read the new one's.

    `make` gives the new operation, which reads the output of the one it gets.
    """
    ops: list[Op] = []
    renamed: dict[str, Tensor] = {}
    for op in graph.ops:
        moved = op.reading(renamed)
        ops.append(moved)
        if found(moved):
            ops.append(make(moved))
            renamed[moved.out.name] = ops[-1].out
    return replace(graph, ops=tuple(ops), logits=renamed.get(graph.logits.name, graph.logits))


@graph_pass
def fuse_input(graph: Graph) -> Graph:
    """Let matmuls of a single token quantise, and norm, their input themselves.

    If a matmul is the only reader of quantised rows and is right after their producer, each thread makes the one row
    of such a forward pass alone, which costs less than an instruction of its own with its barrier.
    """
    readers: dict[str, int] = {}
    for op in graph.ops:
        for x in op.inputs:
            readers[x.name] = readers.get(x.name, 0) + 1
    ops = list(graph.ops)
    for i, (maker, matmul) in enumerate(pairwise(graph.ops)):
        made = maker.out
        if not isinstance(maker, RmsNorm | Quantize) or not isinstance(matmul, MatMul) or matmul.x != made:
            continue
        if made.dtype != "q8" or made.rows != "tokens" or readers[made.name] != 1:
            continue
        how: dict[str, Any] = {"norm": maker.weight, "eps": maker.eps} if isinstance(maker, RmsNorm) else {
            "order": maker.order}
        ops[i], ops[i + 1] = maker.replaced(several=True), matmul.replaced(source=maker.x, **how)
    return replace(graph, ops=tuple(ops))


@approximate()
@graph_pass
def early_exit(graph: Graph, layers: int) -> Graph:
    """Leave out all layers but the first few: their output goes into the final norm and the head (arXiv 2309.08168).
    """
    n = graph.config.num_hidden_layers
    if type(layers) is not int or not 1 <= layers < n:
        raise UsageError(f"early_exit has layers {layers!r:.40}; the model has {n}, so from 1 to {n - 1} can be kept.")
    kept = [op for op in graph.ops if op.layer is None or op.layer < layers]
    ends = {op.layer: op.out for op in graph.ops}  # of each layer: the residual that its last operation leaves
    instead = {ends[n - 1].name: ends[layers - 1]}
    return replace(graph, ops=tuple(op.reading(instead) for op in kept))
