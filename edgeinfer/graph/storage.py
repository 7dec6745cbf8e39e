"""How weights are stored: as asked for when converting, or as a bundle's table says when running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..config import FFN_LAYOUTS, GROUP_SIZES, WEIGHT_TYPES
from ..errors import BundleError, UsageError
from .types import Weight, WeightType

TypeOf = Callable[[Weight], WeightType]


def requested_types(
    weights: str = "q4", group_size: int = 32, embedding: str | None = None, head: str | None = None,
    ffn_layout: str = "tile16",
) -> TypeOf:
    """Storage by request.

    Parameters
    ----------
    weights : {"q4", "int8", "f16", "f32"}
        Type of the layers' matrices.
    group_size : {32, 64, 128}
        Columns per scale of all quantised matrices.
    embedding, head : {"q4", "int8", "f16", "f32"}, optional
        Type of the embedding and of the output head; by default int8 where `weights` is quantised, else as `weights`.
        A tied head is the embedding.
    ffn_layout : {"tile16", "neuron"}
        How FFNs are stored: as matrices, or neuron by neuron (q4 and int8 only), so that dead neurons are not read.
    """
    follow = weights if weights in ("f16", "f32") else "int8"
    chosen = {"matrix": weights, "embedding": embedding or follow, "head": head or follow}
    for option, name in zip(("weights", "embedding", "head"), chosen.values(), strict=True):
        if name not in WEIGHT_TYPES:
            raise UsageError(f"{option} is {name!r}; choose one of {', '.join(WEIGHT_TYPES)}.")
    if group_size not in GROUP_SIZES:
        raise UsageError(f"group_size is {group_size}; choose one of {', '.join(map(str, GROUP_SIZES))}.")
    if ffn_layout not in FFN_LAYOUTS:
        raise UsageError(f"ffn_layout is {ffn_layout!r}; choose one of {', '.join(FFN_LAYOUTS)}.")
    if ffn_layout == "neuron" and weights not in ("q4", "int8"):
        raise UsageError(f"ffn_layout neuron holds q4 and int8, but weights is {weights}; choose one, or tile16.")
    types = {kind: WeightType(name, group_size if name in ("q4", "int8") else 0) for kind, name in chosen.items()}
    types["ffn"] = replace(types["matrix"], layout=ffn_layout)
    return lambda weight: types[weight.kind]


def expected_types(table: Mapping[str, WeightType]) -> TypeOf:
    """Storage as a bundle's tensor table says; a weight that the graph expects and the table lacks is refused.

    Of an FFN that is not stored neuron by neuron, this says that it is in tiles; its matrices are in the table.
    """

    def type_of(weight: Weight) -> WeightType:
        if weight.kind == "ffn" and weight.name not in table:
            return WeightType("f32")
        if weight.name not in table:
            raise BundleError(f"The bundle lacks {weight.name!r}, which its architecture needs; convert it again.")
        return table[weight.name]

    return type_of
