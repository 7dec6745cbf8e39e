"""The output head in a graph whose decoded tokens need its largest logits only: a low-rank matmul estimates all.

The estimator is a part of a bundle (bundle/screens.py). The input of the head goes through a square matrix; the first
values of the result, rounded, times a thin matrix are the estimates, all of them bound their errors (kernels/ops/
screen.py). Rows of the head that cannot hold the largest logit keep their estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.kernels import abi, catalogue

from ...base.dataclass import dataclass
from ...errors import UnsupportedModelError, UsageError
from ...quant import WeightType
from ..graph import Graph
from ..tensors import Tensor, Types
from ..weights import Weight
from .base import Op, other_width
from .costs import Read, Scratch, Sizes
from .matmul import Linear, MatMul
from .rows import GatherOutputs, Quantize, RmsNorm

OUTER_TYPE = WeightType("q4", 32)
"""Type of the thin matrix, in layout tile16."""
_FLOATS = WeightType("f32", 0, "plain")


@dataclass(frozen=True, kw_only=True)
class Screen(Op):
    """Find the tiles that may hold the largest logit: estimate all rows, bound the error, compute the best tile."""

    KERNELS = ("screen_maxima", "screen_least_{stored.suffix}")
    weight: Weight
    """The head."""
    x: Tensor
    estimates: Tensor
    low: Tensor
    rank: int

    def reads(self, types: Types) -> tuple[Read, ...]:
        """A tile of the head."""
        nbytes = types[self.weight.name].tile_bytes(self.weight.shape[1])
        return (Read(self.weight, nbytes, nbytes),)

    def operations(self) -> float:
        """Return the operations of a tile."""
        return 2 * 16 * self.weight.shape[1]

    def scratch(self, sizes: Sizes) -> Scratch:
        """A tile's logits."""
        return Scratch(abi.GATED_SCRATCH_BYTES)

    def faults(self, types: Types) -> Iterator[str]:
        """An estimate for each row of the head."""
        yield from other_width("the head has rows:", self.weight.shape[0], self.estimates)
        yield from other_width("a row of work has words:", abi.screen_row(self.weight.shape[0]) // 4, self.out)


@dataclass(frozen=True, kw_only=True)
class ScreenedHead(MatMul):
    """Compute x W^T for rows that may hold the largest logit, estimates for the others; x W^T for tokens that are not
    sampled.
    """

    KERNELS = ("head_{stored.suffix}",)
    estimates: Tensor
    work: Tensor
    low: Tensor
    bounds: Weight
    share: float
    """Share of the head's tiles that a sampled token computes, as measured when the screen was made."""

    def reads(self, types: Types) -> tuple[Read, ...]:
        """The share of the head that tokens compute which are sampled, and all bounds."""
        nbytes = round(self.share * types[self.weight.name].nbytes(self.weight.shape))
        return (Read(self.weight, nbytes, nbytes), Read.whole(self.bounds, types))

    def faults(self, types: Types) -> Iterator[str]:
        """A bound and an estimate for each row of the head."""
        yield from super().faults(types)
        for what, have in (("the head has rows:", self.weight.shape[0]), ("there are bounds:", self.bounds.shape[0])):
            yield from other_width(what, have, self.out)


@dataclass(frozen=True)
class ScreenableHead:
    """Position of the output head in a graph."""

    index: int
    """Index of its operation."""
    head: Linear
    maker: Op
    """Operation that writes its input."""
    norm: RmsNorm
    """The last norm before it."""
    gather: GatherOutputs
    """Operation that gathers the rows whose logits are wanted."""


def find_head(graph: Graph) -> ScreenableHead:
    """Find the head of a graph.

    Raises
    ------
    UnsupportedModelError
        It is none that can be screened: no plain matmul, or its weights are not codes.
    """
    index, head = next((i, op) for i, op in enumerate(graph.ops) if op.out == graph.logits)
    before = {op.out: op for op in graph.ops[:index]}
    maker = before.get(head.x) if isinstance(head, Linear) else None
    norm = before.get(maker.x) if isinstance(maker, Quantize) else maker
    gather = before.get(norm.x) if isinstance(norm, RmsNorm) else None
    if not isinstance(head, Linear) or head.bias or maker is None or not isinstance(norm, RmsNorm) \
            or not isinstance(gather, GatherOutputs):
        raise UnsupportedModelError(f"The logits are made by {head.label}, which is not a head that can be screened.")
    if not catalogue.is_known(f"head_{graph.types[head.weight.name].suffix}"):
        raise UnsupportedModelError(f"The head {head.weight.name} is stored in {graph.types[head.weight.name]}, and "
                                    "only one in int8 or q4 can be screened; convert with --head int8.")
    return ScreenableHead(index, head, maker, norm, gather)


def inner_type(stored: WeightType) -> WeightType:
    """Return the type of the square matrix: it multiplies the rows that the head, stored so, multiplies."""
    return WeightType("int8", stored.group_size)


def with_screen(graph: Graph, rank: int, share: float) -> Graph:
    """Put a screen of a rank, with which so large a share of the head is computed, before the head of a graph.

    Raises
    ------
    UsageError
        No screen has such numbers.
    UnsupportedModelError
        The head is none that can be screened.
    """
    hidden = graph.config.head_width
    if type(rank) is not int or not 1 <= rank <= hidden or not 0 <= share <= 1:
        raise UsageError(f"A screen of rank {rank!r} of which a share of {share!r} is computed does not exist; ranks "
                         f"are from 1 to hidden_size, {hidden}, shares from 0 to 1.")
    found = find_head(graph)
    index, head = found.index, found.head
    vocab, stored = head.weight.shape[0], graph.types[head.weight.name]
    new = {"inner": ((hidden, hidden), inner_type(stored)), "outer": ((vocab, rank), OUTER_TYPE),
           "bounds": ((vocab,), _FLOATS)}
    weights = {name: Weight(f"screen.{name}", shape, "predictor") for name, (shape, _) in new.items()}
    types = {f"screen.{name}": kind for name, (_, kind) in new.items()}
    here: dict[str, Any] = {"sampled": True}
    low, codes = (Tensor("screen_low", hidden, rows="outputs"),
                  Tensor("screen_low8", rank, "q8", OUTER_TYPE.group_size, "outputs"))
    estimates = Tensor("estimates", vocab, rows="outputs")
    work = Tensor("screen", abi.screen_row(vocab) // 4, rows="outputs")
    made = (
        Linear(out=low, x=head.x, weight=weights["inner"], **here), Quantize(out=codes, x=low, several=True, **here),
        Linear(out=estimates, x=codes, weight=weights["outer"], source=low, **here),
        Screen(out=work, weight=head.weight, x=head.x, estimates=estimates, low=low, rank=rank, **here),
        ScreenedHead(out=head.out, x=head.x, weight=head.weight, estimates=estimates, work=work, low=low,
                     bounds=weights["bounds"], share=float(share)))
    before = [replace(op, several=False) if op is found.maker else op for op in graph.ops[:index]]
    return replace(graph, ops=(*before, *made, *graph.ops[index + 1 :]), types={**graph.types, **types},
                   weights=(*graph.weights, *weights.values()))
