"""Per-tensor quantisation types (mixed precision)."""

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
    """Quantisation types of a model's matrices."""

    types: Mapping[str, WeightType]
    """Types of matrices, or of parts of them, by name."""
    request: str
    """The request, as on the command line."""
    gap: float | None = None
    """Largest share by which another choice of the same size could cost less; None if nothing was chosen by cost."""
    cost: float = 0.0
    """Expected KL divergence in nats if effects of matrices were measured, else the sum of relative errors."""

    def type_of(self) -> TypeOf:
        """Return the type of each weight; weights without an entry, such as a draft head's, get that of q4."""
        others = requested_types()
        return lambda weight: self.types[weight.name] if weight.name in self.types else others(weight)


def mixed_quantisation(graph: Graph) -> Quantisation:
    """Return the quantisation for the header of a bundle of several types: the type of most weights of the layers."""
    nbytes: Counter[WeightType] = Counter()
    ends: dict[str, str] = {}
    for weight in graph.weights:
        stored = graph.types[weight.name]
        if weight.kind in ("matrix", "experts"):
            nbytes[stored] += stored.nbytes(weight.shape)
        elif weight.kind in ("embedding", "head"):
            ends[weight.kind] = stored.dtype
    most_common = nbytes.most_common(1)[0][0]
    group = most_common.group_size if most_common.group_size in GROUP_SIZES else GROUP_SIZES[0]
    return Quantisation(most_common.dtype, group, ends["embedding"], ends.get("head", ends["embedding"]))
