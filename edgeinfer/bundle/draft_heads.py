"""Optional part of a bundle that drafts further tokens: the weights of a graph that `edgeinfer.graph` builds beside the
model's (multi-token prediction, arXiv 2412.19437). Embedding and output head are the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.config import Recipe
from edgeinfer.errors import BundleError
from edgeinfer.graph import Graph, Weight, build_draft_head, draft_head_prefix, expected_types
from edgeinfer.quant import WeightType

from .arrays import Later, pack_arrays
from .parts import FIELDS, check_arrays, check_finite, open_part

if TYPE_CHECKING:
    from .reader import Bundle

DRAFT_HEAD_FILE, PART = "draft_head.bin", "draft_head"


def own_weights(graph: Graph) -> tuple[Weight, ...]:
    """Return the weights of a draft head's graph that are in its part; the others are the model's."""
    return tuple(w for w in graph.weights if w.name.startswith(draft_head_prefix(graph.config)))


def pack_draft_head(graph: Graph, data: Mapping[str, Iterable[Any]], weights: str) -> Iterator[bytes]:
    """Yield the file's bytes.

    Parameters
    ----------
    graph : Graph
        Of the head.
    data : mapping
        Stored bytes of each of its own weights, in pieces, which are asked for in the order of the graph.
    weights : str
        `weights_identity` of the model that it belongs to.
    """
    own = own_weights(graph)
    types = {weight.name: list(_row(graph.types[weight.name])) for weight in own}
    nbytes = {weight.name: graph.types[weight.name].nbytes(weight.shape) for weight in own}
    yield from pack_arrays({"part": PART, "weights": weights, "types": types},
                           {name: Later(np.dtype(np.uint8), (n,), partial(data.__getitem__, name))
                            for name, n in nbytes.items()})


def read_draft_head(bundle: Bundle, recipe: Recipe | None = None) -> Graph | None:
    """Return the graph of a bundle's draft head, or None if it has none.

    Its own weights are of the kind ``predictor``, as all that are in memory beside the model's; of experts, each matrix
    is an array by itself.

    Raises
    ------
    BundleError
        It was made for other weights, does not fit the model, or has values that are not numbers.
    """
    if (opened := open_part(bundle, PART, FIELDS[PART])) is None:
        return None
    about, arrays, where = opened
    types = _types(about["types"], where)
    try:
        graph = build_draft_head(bundle.config, expected_types({**bundle.types, **types}), recipe)
    except BundleError:
        graph = None
    if graph is None or {weight.name for weight in own_weights(graph)} != set(types):
        raise BundleError(f"{where} is not that of a {bundle.config.model_type} model; make it again.")
    own = {weight.name: weight for weight in own_weights(graph)}
    check_arrays(arrays, {name: ((types[name].nbytes(weight.shape),), "u1") for name, weight in own.items()}, where)
    for name, stored in types.items():
        if stored.layout == "plain" and stored.dtype == "f32":
            check_finite(arrays[name].view(np.float32), name, where)
    there = {name: replace(weight, kind="predictor", pieces=0) for name, weight in own.items()}
    ops = tuple(op.replaced(**{field: there[value.name] for field, value in vars(op).items()
                               if isinstance(value, Weight) and value.name in there}) for op in graph.ops)
    return replace(graph, ops=ops, weights=tuple(there.get(weight.name, weight) for weight in graph.weights))


def _row(stored: WeightType) -> tuple[Any, ...]:
    return stored.dtype, stored.group_size, stored.layout, *([list(stored.levels)] if stored.levels else [])


def _levels(own: Iterable[Any] = ()) -> tuple[int, ...]:
    return tuple(map(int, own))


def _types(rows: Any, where: str) -> dict[str, WeightType]:
    """Return the types that a file states, each as its name, group size and layout, perhaps levels."""
    try:
        types = {name: WeightType(str(dtype), int(group), str(layout), _levels(*levels)).checked()
                 for name, (dtype, group, layout, *levels) in rows.items()}
    except (AttributeError, TypeError, ValueError, BundleError):
        raise BundleError(f"{where} states no usable types of its weights; make it again.") from None
    return types
