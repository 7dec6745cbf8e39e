"""Operations of mixtures of experts (arXiv 1701.06538): the choice of experts, and matmuls with the chosen ones.

The rows that experts work on are those of (token, expert), in the order of the list of `SortRoutes`: by expert. A pass
of one token has no such list: its row of `Route` is one, and the matmuls make their inputs themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from edgeinfer.kernels import abi, routes

from ...base.dataclass import dataclass
from ...base.units import round_up
from ..tensors import Number, Tensor, Types
from ..weights import Weight
from .base import Op, RowOp, other_width
from .costs import OnDemand, Read, Scratch, Sizes
from .matmul import MatMul, parameters

ENTRY = routes.ROUTE_BYTES // 4
"""Words of an entry of a list."""
SCORES = {"softmax": routes.SCORE_SOFTMAX, "sigmoid": routes.SCORE_SIGMOID}
"""Functions of router logits, and the number of each in instructions."""


@dataclass(frozen=True, kw_only=True)
class Route(RowOp):
    """Choose the experts of each token and their weights; writes an entry for each, grouped by expert."""

    KERNELS = ("route",)
    logits: Tensor
    bias: Weight | None = None
    """Bias added to scores only while experts are selected."""
    factors: Weight | None = None
    """Factors of the weights of each expert."""
    experts: int
    active: int
    """Experts that a token goes through."""
    scores: str
    """softmax or sigmoid."""
    normalise: bool
    """True if the weights of a token's experts add up to 1 (before they are scaled)."""
    scale: float = 1.0
    groups: int = 1
    """Groups of neighbouring experts, `active_groups` of which are selected first."""
    active_groups: int = 1
    group_best: int = 1
    """Number of a group's best scores whose sum ranks the group."""

    def scratch(self, sizes: Sizes) -> Scratch:
        """Scores, values of the choice, and those of groups."""
        return Scratch(3 * 4 * round_up(self.experts, 16))

    def faults(self, types: Types) -> Iterator[str]:
        """A logit for each expert comes in."""
        yield from other_width("there are experts:", self.experts, self.logits)
        yield from other_width("entries take", ENTRY * self.active, self.out)
        if self.scores not in SCORES:
            yield f"scores is {self.scores!r}; there are {' and '.join(SCORES)}"
        open_experts = self.experts // self.groups * self.active_groups
        if self.experts % self.groups or not 1 <= self.active <= open_experts:
            yield f"{self.active} of {self.experts} experts in {self.groups} groups cannot be chosen"


@dataclass(frozen=True, kw_only=True)
class SortRoutes(RowOp):
    """The entries of all tokens by expert, then where each expert's begin."""

    KERNELS = ("sort_routes",)
    routes: Tensor
    experts: int
    active: int

    def scratch(self, sizes: Sizes) -> Scratch:
        """A count for each expert."""
        return Scratch(4 * self.experts)

    def faults(self, types: Types) -> Iterator[str]:
        """Yield the faults of segments: they are at most as many as entries."""
        yield from other_width("entries and segments take", 2 * ENTRY * self.active, self.out)


@dataclass(frozen=True, kw_only=True)
class ExpertsInput(RowOp):
    """A row for each entry of the list, quantised where the experts want that."""

    KERNELS = ("experts_input_{out.dtype}",)
    quantises = True
    x: Tensor
    listed: Tensor
    active: int

    @property
    def gather(self) -> bool:
        """True if x has a row for each token, not one for each entry."""
        return self.x.times == 1

    def faults(self, types: Types) -> Iterator[str]:
        """Rows keep their width."""
        yield from other_width("the input has rows of", self.x.width, self.out)


@dataclass(frozen=True, kw_only=True)
class SigmoidGate(RowOp):
    """x sigmoid(g): the weighting of a shared expert's inner values (Qwen2-MoE)."""

    KERNELS = ("sigmoid_gate",)
    OVER = "x"
    x: Tensor
    gate: Tensor
    ffn = True

    def faults(self, types: Types) -> Iterator[str]:
        """One gate for a row."""
        yield from other_width("a row has gates:", 1, self.gate)


@dataclass(frozen=True, kw_only=True)
class _Experts(MatMul):
    """Matmuls with the matrices of all experts, one after the other; a token uses a few of them."""

    routes: Tensor
    listed: Tensor
    experts: int
    active: int
    """Experts that a token goes through."""
    ffn = True
    TILES: ClassVar[int] = 1
    """Matrices that share an expert's tiles."""

    @property
    def rows(self) -> int:
        """Rows of one expert's matrix, or of one of its two, padded to whole tiles."""
        return self.weight.shape[0] // self.experts // self.TILES

    def reads(self, types: Types) -> tuple[Read, ...]:
        """A token reads its experts, a prompt all."""
        whole = [Read.whole(weight, types) for weight in (self.weight, self.bias) if weight]
        return tuple(Read(read.weight, read.batch * self.active / self.experts, read.batch) for read in whole)

    def memory(self, types: Types) -> OnDemand | None:
        """An expert's part of the matrices."""
        nbytes = types[self.weight.name].nbytes(self.weight.shape) // self.experts
        return OnDemand("experts", self.layer or 0, self.weight, self.experts, nbytes, self.active)

    def operations(self) -> float:
        """Return the operations of the active experts."""
        return 2 * parameters(self.weight) * self.active / self.experts

    def activation_values(self) -> float:
        """Return the values of the active experts."""
        return (self.rows * self.TILES + self.weight.shape[1]) * self.active

    def quantiser(self, x: Tensor, group: int, number: Number) -> Op:
        """Quantise x in the order of the list."""
        out = Tensor(number("e"), x.width, "q8", group, x.rows, self.active)
        return ExpertsInput(out=out, x=x, listed=self.listed, active=self.active, several=True, layer=self.layer)

    def scratch(self, sizes: Sizes) -> Scratch:
        """A block of results, and a single token's quantised rows, with a row of floats."""
        stride = abi.q8_row_bytes(self.x.width, self.x.group_size)[0] if self.x.dtype == "q8" else 0
        return Scratch(abi.GATED_SCRATCH_BYTES + self.active * stride)

    def faults(self, types: Types) -> Iterator[str]:
        """Each expert's matrices are padded to whole tiles."""
        yield from super().faults(types)
        yield from other_width("an expert has rows, padded:", self.rows, self.out, 16)
        if self.weight.shape[0] != self.rows * self.TILES * self.experts:
            yield f"{self.weight.shape[0]} rows are not those of {self.experts} experts"
        if self.source is None:
            yield "experts need the source of their rows"


@dataclass(frozen=True, kw_only=True)
class ExpertsGated(_Experts):
    """act(x G^T) * (x U^T) of the chosen experts, in the order of the list."""

    KERNELS = ("experts_gated_{stored.suffix}",)
    TILES = 2
    activation: str
    limit: float = 0.0
    """Limit of swiglu_oai."""


@dataclass(frozen=True, kw_only=True)
class ExpertsDown(_Experts):
    """(residual +) the weighted f D^T of the chosen experts, added by expert."""

    KERNELS = ("experts_down_{stored.suffix}",)
    OVER = "residual"
    residual: Tensor | None = None
