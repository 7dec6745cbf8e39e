"""Checkpoints of MLX, which stores the weight of a convolution as (channels, width, 1) and adds 1 to some norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Affine, Graph, Source, Tap, Weight, family_of


def with_channels_last(graph: Graph, shape_of: Callable[[str], tuple[int, ...] | None]) -> Graph:
    """Return the graph with the sources of a checkpoint as MLX writes it, if it is one.

    MLX changes a model when it converts it: convolutions have their channels last, norms that are stored as their
    difference from 1 are stored whole. `shape_of` tells the shape of a stored tensor, None if there is none.

    Raises
    ------
    UnsupportedModelError
        The model has multipliers, which MLX folds into weights.
    """
    if not graph.config.recurrent or not any(_turned(source, shape_of) for weight in graph.weights
                                             for source in weight.sources):
        return graph
    if graph.config.multipliers:
        raise UnsupportedModelError("The convolutions of the checkpoint have their channels last, as MLX writes them, "
                                    "and its config.json has multipliers, which MLX folds into some weights; convert "
                                    "the original checkpoint.")
    shifted = family_of(graph.config.model_type).norms_plus_one

    def changed(source: Source) -> Source:
        if _turned(source, shape_of):
            channels, one, width = source.stored
            return replace(source, stored=(channels, width, one))
        steps = tuple(step for step in source.steps if not (shifted and step == Affine(plus=1.0)))
        return replace(source, steps=steps)

    def renewed(weight: Weight) -> Weight:
        return replace(weight, sources=tuple(map(changed, weight.sources)))

    return replace(graph, weights=tuple(map(renewed, graph.weights)))


def _turned(source: Source, shape_of: Callable[[str], tuple[int, ...] | None]) -> bool:
    """Whether it is a convolution's weight that is stored as (channels, width, 1)."""
    if not any(isinstance(step, Tap) for step in source.steps):
        return False
    channels, one, width = source.stored
    return shape_of(source.name) == (channels, width, one)
