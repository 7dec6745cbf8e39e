"""Operations of families that edgeinfer cannot run yet: their costs are known, kernels are not there."""

from __future__ import annotations

from collections.abc import Iterator

from ..dataclass import dataclass
from .operation import Read, Scratch, Sizes
from .products import Product, parameters
from .types import Tensor, Types


@dataclass(frozen=True, kw_only=True)
class _Experts(Product):
    """Matrices of all experts, one after the other; a token goes through a few (arXiv 2401.04088)."""

    KERNELS = ()
    experts: int
    active: int
    """Experts that a token goes through."""
    ffn = True

    def reads(self, types: Types) -> tuple[Read, ...]:
        """A token reads its experts, a prompt all."""
        nbytes = types[self.weight.name].nbytes(self.weight.shape)
        return (Read(self.weight, nbytes * self.active / self.experts, nbytes),)

    def operations(self) -> float:
        """Of the active experts."""
        return 2 * parameters(self.weight) * self.active / self.experts

    def activation_values(self) -> float:
        """Of the active experts."""
        return sum(self.weight.shape) * self.active / self.experts

    @property
    def dynamic_share(self) -> float:
        """Which experts is the token's choice."""
        return 1.0

    def scratch(self, sizes: Sizes) -> Scratch:
        """Not known before there are kernels."""
        return Scratch()

    def faults(self, types: Types) -> Iterator[str]:
        """Nothing: rows of experts are padded one by one."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class ExpertsGated(_Experts):
    """act(x G^T) * (x U^T) of the chosen experts."""

    activation: str


@dataclass(frozen=True, kw_only=True)
class ExpertsDown(_Experts):
    """residual + the weighted f D^T of the chosen experts."""

    OVER = "residual"
    residual: Tensor
