"""Storage types of weights: as requested for a conversion, or as a bundle's table lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import BundleError, UsageError
from ..quant import SUPER_COLUMNS, TYPES, WeightType, embedding_type, holds, requestable
from ..registry import CONVERSION, plain
from .weights import Weight

ROUTER = WeightType("f32")
"""Type of routers: they are small, and a score that is a little off takes a token through another expert."""
TypeOf = Callable[[Weight], WeightType]
FLOATS = WeightType("f32", 0, "plain")
"""Type of norms and biases."""
ABSENT = FLOATS
"""Type of a part of a matrix (kind ``part``) that is stored whole, as no matrix is stored as plain floats; and of a
column order (kind ``order``) if columns are in their own order.
"""
ORDER = WeightType("i32", 0, "plain")
"""Type of an order of columns: element i is the input that column i multiplies."""


def requested_types(
    weights: str = "q4", group_size: int = 32, embedding: str | None = None, head: str | None = None,
    ffn_layout: str = "tile16",
) -> TypeOf:
    """Storage by request.

    Parameters
    ----------
    weights : str
        Type of the layers' matrices, one of `WEIGHT_TYPES`.
    group_size : int
        Columns per scale of all quantised matrices.
    embedding, head : str, optional
        Type of the embedding and of the output head; by default int8 where `weights` is quantised, else as `weights`.
        A tied head is the embedding.
    ffn_layout : {"tile16", "neuron"}
        How FFNs are stored: as matrices, or neuron by neuron (quantised types only), so that dead neurons are not read.
    """
    asked = plain({"weights": weights, "group_size": group_size, "embedding": embedding, "head": head,
                   "ffn_layout": ffn_layout}, CONVERSION)
    follow = embedding_type(weights)
    chosen = {"matrix": weights, "embedding": asked["embedding"] or follow, "head": asked["head"] or follow}
    if weights not in holds(ffn_layout):
        raise UsageError(f"ffn_layout {ffn_layout} holds {', '.join(holds(ffn_layout))}, but weights is {weights}; "
                         "choose one, or tile16.")
    groups = TYPES[weights].neuron_groups
    if ffn_layout == "neuron" and asked["group_size"] not in groups:
        raise UsageError(f"ffn_layout neuron holds {weights} in groups of {' or '.join(map(str, groups))}, but "
                         f"group_size is {asked['group_size']}; choose one of these.")
    types = {kind: WeightType.of(name, asked["group_size"]) for kind, name in chosen.items()}
    types |= {"ffn": replace(types["matrix"], layout=ffn_layout), "part": ABSENT, "order": ABSENT,
              "experts": types["matrix"], "rows": types["matrix"], "inputs": types["embedding"], "router": ROUTER}
    return lambda weight: fitting(types[weight.kind], weight.shape)


def fitting(stored: WeightType, shape: tuple[int, ...]) -> WeightType:
    """Return the type, or its replacement where a nested one does not fit the rows of a matrix.

    That is the type with the fewest bits, but no fewer, whose scales are not nested; of several one with the same
    levels.
    """
    row = stored.storage
    if not row.nested or not shape or shape[-1] % SUPER_COLUMNS == 0:
        return stored
    others = [WeightType.of(name) for name in requestable() if TYPES[name].groups and not TYPES[name].nested]
    return min((other for other in others if other.bits_per_weight >= stored.bits_per_weight),
               key=lambda other: (other.bits_per_weight, other.storage.table != row.table))


def expected_types(table: Mapping[str, WeightType]) -> TypeOf:
    """Storage as a bundle's tensor table says; a weight that the graph expects and the table lacks is refused.

    Of an FFN that is not stored neuron by neuron, this says that it is in tiles; its matrices are in the table. Of a
    part of a matrix that is stored whole it says `ABSENT`, and of the order of columns that is their own.
    """

    def type_of(weight: Weight) -> WeightType:
        if weight.kind == "ffn" and weight.name not in table:
            return WeightType("f32")
        if weight.kind in ("part", "order") and weight.name not in table:
            return ABSENT
        if weight.name not in table:
            raise BundleError(f"The bundle lacks {weight.name!r}, which its architecture needs; convert it again.")
        return table[weight.name]

    return type_of
