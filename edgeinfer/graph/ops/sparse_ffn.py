"""Predictors of live neurons in a graph: the operations that make masks, and the pass that puts them before the FFNs.

A predictor is a part of a bundle (bundle/parts.py); a recipe names its kind and rank, so that the graph with it can be
planned and printed without it. Prompts compute all neurons: masks are for tokens that are decoded, one by one or
verified together, and each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from ...base.dataclass import dataclass
from ...base.units import round_up
from ...errors import UnsupportedModelError, UsageError
from ...quant import WeightType
from ..graph import Graph
from ..tensors import Tensor, Types
from ..weights import Weight
from .base import Op, RowOp, other_width
from .costs import Read, Scratch, Sizes
from .matmul import Linear, NeuronGated, mask_width
from .rows import Quantize

PREDICTORS = ("sign", "lowrank", "threshold")
"""Criteria for computing a neuron: the signs of its gate, a low-rank matmul, or the gate itself."""
PREDICTOR_TYPE = WeightType("int8", 32)
"""Type of both matrices of a low-rank predictor, in layout tile16, as the kernels of matmuls read them."""
_FLOATS = WeightType("f32", 0, "plain")


@dataclass(frozen=True, kw_only=True)
class ScoreMask(RowOp):
    """Bits of the neurons whose score is above their threshold."""

    KERNELS = ("neuron_mask_scores",)
    x: Tensor
    """Scores."""
    thresholds: Weight

    def reads(self, types: Types) -> tuple[Read, ...]:
        """The thresholds."""
        return (Read.whole(self.thresholds, types),)

    def faults(self, types: Types) -> Iterator[str]:
        """A score, a threshold and a bit for each neuron."""
        yield from other_width("there are thresholds:", self.thresholds.shape[0], self.x)
        yield from other_width("a mask has words of 32 bits:", mask_width(self.x.width), self.out)


@dataclass(frozen=True, kw_only=True)
class SignMask(RowOp):
    """Bits of the neurons whose gate has enough signs in common with x (SparseInfer, arXiv 2411.12692)."""

    KERNELS = ("neuron_mask_signs",)
    x: Tensor
    signs: Weight
    """A bit for each weight of the gates, in words of 64 columns."""
    thresholds: Weight

    def reads(self, types: Types) -> tuple[Read, ...]:
        """Signs and thresholds."""
        return (Read.whole(self.signs, types), Read.whole(self.thresholds, types))

    def scratch(self, sizes: Sizes) -> Scratch:
        """The signs of a row of x."""
        return Scratch(round_up(self.x.width, 64) // 8)

    def faults(self, types: Types) -> Iterator[str]:
        """x is quantised, as the gates read it."""
        if self.x.dtype != "q8":
            yield f"signs are taken of quantised rows, but the input is {self.x}"
        yield from other_width("a mask has words of 32 bits:", mask_width(self.thresholds.shape[0]), self.out)


def with_predictor(graph: Graph, kind: str, rank: int = 0, without: Collection[int] = ()) -> Graph:
    """Let decoded tokens compute the neurons that a predictor chooses.

    Parameters
    ----------
    kind : one of `PREDICTORS`
    rank : of a low-rank predictor
    without : layers that stay as they are

    Raises
    ------
    UnsupportedModelError
        The FFNs are not stored neuron by neuron.
    UsageError
        There is no such predictor.
    """
    least, most = (1, graph.config.hidden_size) if kind == "lowrank" else (0, 0)
    if kind not in PREDICTORS or type(rank) is not int or not least <= rank <= most:
        raise UsageError(f"A predictor of kind {kind!r} and rank {rank!r} does not exist; kinds are "
                         f"{', '.join(PREDICTORS)}, and only lowrank has a rank, from 1 to hidden_size.")
    ops: list[Op] = []
    types, weights = dict(graph.types), list(graph.weights)

    def weight(layer: int, name: str, shape: tuple[int, ...], stored: WeightType = _FLOATS) -> Weight:
        weights.append(Weight(f"layers.{layer}.predictor.{name}", shape, "predictor"))
        types[weights[-1].name] = stored
        return weights[-1]

    for op in graph.ops:
        if isinstance(op, NeuronGated) and (op.layer or 0) not in without:
            if kind != "threshold" and op.source:  # the predictor reads x too: it is made where one token runs as well
                ops[-1] = replace(ops[-1], several=False)
                op = replace(op, source=None, norm=None, eps=None)
            ops += _with_choice(op, ops[-1], kind, rank, weight)
        else:
            ops.append(op)
    if not any(isinstance(op, NeuronGated) for op in graph.ops):
        raise UnsupportedModelError("The model's FFNs are not stored neuron by neuron, so no neurons can be left out; "
                                    "`edgeinfer sparsify` makes a bundle where they are.")
    return replace(graph, ops=tuple(ops), types=types, weights=tuple(weights))


def _with_choice(op: NeuronGated, maker: Op, kind: str, rank: int, weight: Callable[..., Weight]) -> list[Op]:
    """Return the operations that choose a layer's neurons, then the FFN's with the choice."""
    layer, neurons = op.layer or 0, op.weight.shape[0]
    thresholds = weight(layer, "thresholds", (1 if kind == "threshold" else neurons,))
    if kind == "threshold":
        return [replace(op, threshold=thresholds)]
    here: dict[str, Any] = {"layer": op.layer, "decoded": True}
    mask = Tensor(f"mask.{layer}", mask_width(neurons))
    if kind == "sign":
        words = round_up(op.x.width, 64) // 32
        signs = weight(layer, "signs", (neurons * words,))
        return [SignMask(out=mask, x=op.x, signs=signs, thresholds=thresholds, **here), replace(op, mask=mask)]
    before: list[Op] = []
    x, group = op.x, PREDICTOR_TYPE.group_size
    if x.group_size != group:  # the FFN's own input has larger groups
        x = Tensor(f"predicted.{layer}", x.width, "q8", group)
        before.append(replace(maker, out=x, decoded=True))
    low, codes = Tensor(f"low.{layer}", rank), Tensor(f"low8.{layer}", rank, "q8", group)
    scores = Tensor(f"scores.{layer}", neurons)
    inner = weight(layer, "inner", (rank, x.width), PREDICTOR_TYPE)
    outer = weight(layer, "outer", (neurons, rank), PREDICTOR_TYPE)
    return [
        *before, Linear(out=low, x=x, weight=inner, **here), Quantize(out=codes, x=low, several=True, **here),
        Linear(out=scores, x=codes, weight=outer, source=low, **here),
        ScoreMask(out=mask, x=scores, thresholds=thresholds, **here), replace(op, mask=mask)]

