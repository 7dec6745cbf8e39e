"""The builder's words for mixtures of experts: the choice of experts, and their FFNs."""

from __future__ import annotations

from dataclasses import replace

from ...base.units import round_up
from ...quant import WeightType
from ..ops.experts import ENTRY, ExpertsDown, ExpertsGated, ExpertsInput, Route, SigmoidGate, SortRoutes
from ..tensors import Tensor
from ..weights import Source, Weight
from .base import BuilderBase


class ExpertWords(BuilderBase):
    """Operations over lists of (token, expert)."""

    def route(self, h: Tensor, name: str, hf: str, factors: str = "") -> Tensor:
        """Route each token to experts by a router's scores of h; `hf` is the layer's module.

        The tensors of all families go by one set of names (converters/checkpoint/expert_names.py has the others).
        `factors` names the factors of each expert's weights.
        """
        e = self.config.experts
        assert e
        logits = self.linear(h, name + "router", (hf + "gate.weight",), (e.total,), kind="router",
                             bias=(hf + "gate.bias",) if e.bias else ())
        return self._op(Route(
            out=self._tensor("routes", ENTRY * e.active), logits=logits, experts=e.total, active=e.active,
            scores=e.scores, normalise=e.normalise, scale=e.scale, groups=e.groups, active_groups=e.active_groups,
            group_best=e.group_best, layer=self.layer,
            bias=self._vector(name + "router_bias", (hf + "gate.e_score_correction_bias",), (e.total,))
            if e.choice_bias else None,
            factors=self._vector(name + "expert_factors", (factors,), (e.total,)) if factors else None))

    def experts(self, x: Tensor, routes: Tensor, name: str, hf: str, residual: Tensor | None) -> Tensor:
        """(residual +) the weighted FFNs of x of the experts that `route` chose; names as there.

        Experts without a gate have their first matrix as gate and up: relu(u) u is relu2(u), bit for bit.
        """
        c, e = self.config, self.config.experts
        assert e
        listed = self._op(SortRoutes(out=self._tensor("listed", 2 * ENTRY * e.active), routes=routes, experts=e.total,
                                     active=e.active, several=True, layer=self.layer))
        size, width = e.intermediate_size, residual.width if residual else x.width
        first = ("gate_proj" if e.gated else "up_proj", "up_proj")
        gate_up = self._stack(name + "experts_gate_up", hf + "experts.{}.", first, (size, x.width))
        down = self._stack(name + "experts_down", hf + "experts.{}.", ("down_proj",), (width, size))
        inner, outer = (self._stack_bias(name + which, hf + "experts.{}.", parts, rows) if e.bias else None
                        for which, parts, rows in (("experts_gate_up_bias", ("gate_proj", "up_proj"), size),
                                                   ("experts_down_bias", ("down_proj",), width)))
        rows = self._op(ExpertsInput(out=replace(self._tensor("e", x.width), rows=x.rows, times=e.active), x=x,
                                     listed=listed, active=e.active, several=True, layer=self.layer))
        f = self._op(ExpertsGated(
            out=replace(self._tensor("f", size), times=e.active), x=rows,
            weight=gate_up, bias=inner, source=x, routes=routes, listed=listed,
            activation=c.hidden_act if e.gated else "relu",
            limit=c.hidden_act_limit, experts=e.total, active=e.active, layer=self.layer))
        out = self._after(residual) if residual else self._tensor("experts", width)
        return self._op(ExpertsDown(out=out, x=f, weight=down, bias=outer, source=f,
                                    routes=routes, listed=listed, residual=residual, experts=e.total, active=e.active,
                                    layer=self.layer))

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x sigmoid(gate), a gate for each row."""
        return self._op(SigmoidGate(out=self._after(x), x=x, gate=gate, layer=self.layer))

    def _stack(self, name: str, module: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Weight:
        """Matrices of all experts, each padded to whole tiles; of two, tiles alternate."""
        assert self.config.experts
        n, (rows, cols) = self.config.experts.total, shape
        twice = len(parts) == 2 and not self.config.experts.gated
        sources = tuple(Source(f"{module}{part}.weight", (n, *shape), each=True, shared=twice) for part in parts)
        combine = "stacked_pairs16" if len(parts) == 2 else "stacked16"
        weight = Weight(name, (n * len(parts) * round_up(rows, 16), cols), "experts", sources, combine, n)
        self._weights[name], self._types[name] = weight, self._type_of(weight)
        return weight

    def _stack_bias(self, name: str, module: str, parts: tuple[str, ...], rows: int) -> Weight:
        """Biases of the matrices that `_stack` has, padded and alternating as these."""
        assert self.config.experts
        n = self.config.experts.total
        sources = tuple(Source(f"{module}{part}.bias", (n, rows), each=True) for part in parts)
        combine = "stacked_pairs16" if len(parts) == 2 else "stacked16"
        weight = Weight(name, (n * len(parts) * round_up(rows, 16),), "vector", sources, combine)
        self._weights[name], self._types[name] = weight, WeightType("f32", 0, "plain")
        return weight
