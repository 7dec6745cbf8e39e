"""How weights are stored: as asked for when converting, or as a bundle's table says when running."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import GROUP_SIZES, WEIGHT_TYPES
from ..errors import BundleError, UsageError
from .types import Weight, WeightType

TypeOf = Callable[[Weight], WeightType]


def requested_types(
    weights: str = "q4", group_size: int = 32, embedding: str | None = None, head: str | None = None
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
    """
    follow = weights if weights in ("f16", "f32") else "int8"
    chosen = {"matrix": weights, "embedding": embedding or follow, "head": head or follow}
    for option, name in zip(("weights", "embedding", "head"), chosen.values(), strict=True):
        if name not in WEIGHT_TYPES:
            raise UsageError(f"{option} is {name!r}; choose one of {', '.join(WEIGHT_TYPES)}.")
    if group_size not in GROUP_SIZES:
        raise UsageError(f"group_size is {group_size}; choose one of {', '.join(map(str, GROUP_SIZES))}.")
    types = {kind: WeightType(name, group_size if name in ("q4", "int8") else 0) for kind, name in chosen.items()}
    return lambda weight: types[weight.kind]


def expected_types(table: Mapping[str, WeightType]) -> TypeOf:
    """Storage as a bundle's tensor table says; a weight that the graph expects and the table lacks is refused."""

    def type_of(weight: Weight) -> WeightType:
        if weight.name not in table:
            raise BundleError(f"The bundle lacks {weight.name!r}, which its architecture needs; convert it again.")
        return table[weight.name]

    return type_of
