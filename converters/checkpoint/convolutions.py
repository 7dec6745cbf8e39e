"""Convolutions that a checkpoint stores in another form: those of q, k and v apart, or with channels last (MLX)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import Affine, Graph, Source, Tap, Weight, family_of

ShapeOf = Callable[[str], tuple[int, ...] | None]
"""Tells the shape of a stored tensor, None if there is none."""


def with_convolutions_apart(graph: Graph, shape_of: ShapeOf) -> Graph:
    """Return the graph with the sources of a checkpoint that has convolutions in pieces, named as those of q, k and v.

    transformers (5.24) cuts the channels into three equal pieces when it saves a model, so any sizes are accepted that
    add up.

    Raises
    ------
    CheckpointError
        They do not.
    """
    def pieces(source: Source) -> tuple[Source, ...]:
        if not any(isinstance(step, Tap) for step in source.steps) or shape_of(source.name):
            return (source,)
        names = [source.name.replace("conv1d.", f"{part}_conv1d.") for part in "qkv"]
        rows = [shape[0] for shape in map(shape_of, names) if shape]
        if len(rows) != len(names):
            return (source,)
        if sum(rows) != source.stored[0]:
            raise CheckpointError(f"The tensors {', '.join(names)} have {sum(rows)} rows together, but config.json "
                                  f"needs {source.stored[0]}; download the checkpoint again.")
        return tuple(replace(source, name=name, stored=(n, *source.stored[1:]))
                     for name, n in zip(names, rows, strict=True))

    return replace(graph, weights=tuple(
        replace(weight, sources=tuple(piece for source in weight.sources for piece in pieces(source)))
        if graph.config.recurrent else weight for weight in graph.weights))


def with_channels_last(graph: Graph, shape_of: ShapeOf) -> Graph:
    """Return the graph with the sources of a checkpoint as MLX writes it, if it is one.

    MLX changes a model when it converts it: convolutions have their channels last, norms that are stored as their
    difference from 1 are stored whole.

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


def _turned(source: Source, shape_of: ShapeOf) -> bool:
    """Return whether it is a convolution's weight that is stored as (channels, width, 1)."""
    if not any(isinstance(step, Tap) for step in source.steps):
        return False
    channels, one, width = source.stored
    return shape_of(source.name) == (channels, width, one)
