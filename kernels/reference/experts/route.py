"""References of the choice of experts, and of the sorting of tokens by expert."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...abi import COUNT_SEVERAL, FLAG_BIAS, FLAG_SCALED
from ...parameters import ROUTE
from ...routes import ROUTE_BYTES, ROUTE_EXPERT, ROUTE_SEGMENTS, ROUTE_TOKEN, ROUTE_WEIGHT, SCORE_SIGMOID
from ..expected import Expected
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of, memory

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


def scores_of(logits: Doubles, sigmoid: bool) -> Doubles:
    """Score of each expert, (T, experts): the sigmoid of its logit, or its share of the softmax."""
    with np.errstate(over="ignore"):
        if sigmoid:
            return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def best(values: Doubles, n: int) -> NDArray[np.bool_]:
    """Mark the n largest of each row, of equal ones the first."""
    order = np.argsort(-values, axis=1, kind="stable")
    marks = np.zeros(values.shape, bool)
    np.put_along_axis(marks, order[:, :n], True, axis=1)
    return marks


def choose_experts(values: Doubles, active: int, groups: int = 1, active_groups: int = 1, group_best: int = 1) -> Ints:
    """Choose experts by `values` (T, experts), of the best groups of neighbours; (T, active), ascending.

    A group is worth the sum of its `group_best` largest values.
    """
    tokens, experts = values.shape
    parts = values.reshape(tokens, groups, experts // groups)
    worth = np.sort(parts, axis=2)[:, :, ::-1][:, :, :group_best].sum(axis=2)
    open_groups = np.repeat(best(worth, active_groups), experts // groups, axis=1)
    marks = best(np.where(open_groups, values, -np.inf), active)
    return np.nonzero(marks)[1].reshape(tokens, active)


def _view(address: int, dtype: Any, field: int, tokens: int, active: int, stride: int) -> NDArray[Any]:
    return memory(address + field, dtype, (tokens, active), (stride, ROUTE_BYTES))


def _as_good(stored: NDArray[np.int32], values: Doubles, wanted: Ints) -> Ints:
    """Return the stored experts if their values add up to as much as those of `wanted`, up to rounding, and are in
    order.
    """
    inside = ((stored >= 0) & (stored < values.shape[1])).all(axis=1)
    good = inside & (np.diff(stored, axis=1) > 0).all(axis=1)
    ids = np.where(good[:, None], stored, wanted)
    have, want = (np.take_along_axis(values, which, axis=1) for which in (ids, wanted))
    near = np.abs(have.sum(axis=1) - want.sum(axis=1)) <= TOLERANCES["route"] * np.abs(want).sum(axis=1) + TINY
    return np.where(near[:, None], ids, wanted).astype(np.int32)


def route_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``route``."""
    p = view.parameters(ROUTE)
    tokens = view.count(p.rows)
    logits = view.array(0, np.float32, (tokens, p.experts), (p.in_stride, 4)).astype(np.float64)
    scores = scores_of(logits, p.scores == SCORE_SIGMOID)
    biased = bool(view.flags & FLAG_BIAS)
    factors = view.array(4, np.float32, (p.experts,)) if view.flags & FLAG_SCALED else np.ones(p.experts)
    values = scores + view.array(2, np.float32, (p.experts,)) if biased else logits
    wanted = choose_experts(values, p.active, p.groups, p.active_groups, p.group_best)
    experts, numbers, weights = (_view(view.address(1), kind, field, tokens, p.active, p.out_stride)
                                 for kind, field in ((np.int32, ROUTE_EXPERT), (np.int32, ROUTE_TOKEN),
                                                     (np.float32, ROUTE_WEIGHT)))
    chosen = partial(_as_good, experts, values, wanted) if biased else wanted

    def weighted() -> Doubles:
        y = np.take_along_axis(scores, experts.astype(np.int64), axis=1)
        own = factors[experts.astype(np.int64)]
        return own * (y / (y.sum(axis=1, keepdims=True) + 1e-20) if p.normalise else y) * float_of(p.scale)

    most = abs(float_of(p.scale)) * np.abs(factors).max()
    near = TOLERANCES["route"] * most * (1 if p.normalise else scores.max(axis=1, initial=0)[:, None])
    return [Expected("experts", experts, chosen),
            Expected("tokens", numbers, np.broadcast_to(np.arange(tokens)[:, None], numbers.shape)),
            Expected("weights", weights, weighted, exact=False, tolerance=near + TINY)]


def sort_routes_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``sort_routes``: a stable sort by expert."""
    p = view.parameters(ROUTE)
    tokens = view.count(p.rows)
    experts, weights = (_view(view.address(0), kind, field, tokens, p.active, p.in_stride).reshape(-1).copy()
                        for kind, field in ((np.int32, ROUTE_EXPERT), (np.float32, ROUTE_WEIGHT)))
    if not tokens:
        return []
    order = np.argsort(experts, kind="stable")
    found, first, counts = np.unique(experts[order], return_index=True, return_counts=True)
    out, n = view.address(1), len(order)
    fields = [memory(out + field, kind, (n,), (ROUTE_BYTES,)) for kind, field in
              ((np.int32, ROUTE_EXPERT), (np.int32, ROUTE_TOKEN), (np.float32, ROUTE_WEIGHT))]
    segments = memory(out + ROUTE_BYTES * n, np.int32, (len(found), 3), (ROUTE_BYTES, 4))
    return [Expected("experts", fields[0], experts[order]), Expected("tokens", fields[1], order // p.active),
            Expected("weights", fields[2], weights[order]),
            Expected("count", memory(out + ROUTE_SEGMENTS, np.int32, (1,)), np.array([len(found)])),
            Expected("segments", segments, np.stack([found, first, counts], axis=1))]


class Routes:
    """The list that an instruction of experts works on: entries of all tokens, or the one row of a pass's single
    token.
    """

    def __init__(self, view: InstructionView, tokens: int, active: int, row: int, whole: int):
        self.single = not view.count(COUNT_SEVERAL)
        address, n = view.address(row if self.single else whole), tokens * active
        self.experts, self.tokens = (memory(address + field, np.int32, (n,), (ROUTE_BYTES,)).astype(np.int64)
                                     for field in (ROUTE_EXPERT, ROUTE_TOKEN))
        self.weights = memory(address + ROUTE_WEIGHT, np.float32, (n,), (ROUTE_BYTES,)).astype(np.float64)

    def segments(self) -> list[tuple[int, slice]]:
        """Experts, and where their entries are, in the list's order."""
        edges = [0, *(np.flatnonzero(np.diff(self.experts)) + 1), len(self.experts)]
        return [(int(self.experts[a]), slice(int(a), int(b))) for a, b in pairwise(edges) if a < b]
