"""Grouping of a weight's sources that come in several types."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from edgeinfer.graph import Source, Weight
from edgeinfer.quant import TILE_ROWS, WeightType

Stored = Callable[[list[Source]], WeightType]
"""The smallest type that holds sources together."""


def parts_by_type(weight: Weight, stored: Stored, kind: Callable[[Source], Hashable]) -> dict[int | None, list[Source]]:
    """The sources of a weight as they are stored: together (None), or runs of one type by the number of the first.

    They are stored apart where together only floats would hold them, if each run but the last fills whole tiles of
    rows.

    Parameters
    ----------
    weight : Weight
    stored : callable
    kind : callable
        Tells sources apart that have the same type alone and not together.
    """
    sources = list(weight.sources)
    types = [(stored([source]), kind(source)) for source in sources]
    firsts = [i for i, kind in enumerate(types) if i == 0 or kind != types[i - 1]]
    whole = all(sum(source.shape[0] for source in sources[:first]) % TILE_ROWS == 0 for first in firsts)
    quantised = any(one.quantised for one, _ in types)
    if stored(sources).quantised or not quantised or weight.combine != "concat" or not whole:
        return {None: sources}
    return {i: sources[i:end] for i, end in zip(firsts, [*firsts[1:], len(sources)], strict=True)}


def name_of_part(weight: Weight, first: int | None) -> str:
    """The name of a weight, or of the part of it that begins with a source."""
    return weight.name if first is None else f"{weight.name}.{first}"
