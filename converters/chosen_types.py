"""Types of weights that differ from matrix to matrix, however they were chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Quantisation
from edgeinfer.config import GROUP_SIZES
from edgeinfer.graph import Graph, TypeOf, requested_types
from edgeinfer.quant import WeightType


@dataclass(frozen=True)
class ChosenTypes:
    """The types of a model's matrices."""

    types: Mapping[str, WeightType]
    """Of matrices, or of parts of them, by name."""
    request: str
    """The request, as on the command line."""
    gap: float | None = None
    """Share by which a choice of the same bytes could cost less, at most; None if nothing was chosen by cost."""
    cost: float = 0.0
    """Expected divergence in nats where effects of matrices were measured, else the sum of relative errors."""

    def type_of(self) -> TypeOf:
        """Return the storage of each weight; of one that has no name here, such as a draft head's, as q4 has it."""
        others = requested_types()
        return lambda weight: self.types[weight.name] if weight.name in self.types else others(weight)

    def quantisation(self, graph: Graph) -> Quantisation:
        """Return what the header of a bundle says: the type of most of the layers' weights."""
        nbytes: Counter[WeightType] = Counter()
        ends: dict[str, str] = {}
        for weight in graph.weights:
            stored = graph.types[weight.name]
            if weight.kind in ("matrix", "experts"):
                nbytes[stored] += stored.nbytes(weight.shape)
            elif weight.kind in ("embedding", "head"):
                ends[weight.kind] = stored.dtype
        chief = nbytes.most_common(1)[0][0]
        group = chief.group_size if chief.group_size in GROUP_SIZES else GROUP_SIZES[0]
        return Quantisation(chief.dtype, group, ends["embedding"], ends.get("head", ends["embedding"]))
