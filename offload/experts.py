"""MoE models whose weights do not fit: which part of the experts the cache holds, and the bytes that a token reads from
storage.

All that a token needs whatever it chooses stays in memory; the rest of the budget is slots for experts. Every expert
may take any of them, so no layer is chosen: the cache keeps the experts that tokens use
(kernels/ops/experts/experts_resolve.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from edgeinfer.memory_planner import (
    MAX_READ_BYTES,
    MIN_READ_BYTES,
    READERS,
    ExpertsPlan,
    MemoryPlan,
    Planner,
    Request,
    in_memory,
    moes,
)

ALIKE, SKEWED = 0.5, 0.75
"""Share of a token's choices that the busier half of a layer's experts takes: where all are alike, and where routing is
said to be skewed."""


def keep_experts(planner: Planner, request: Request, budget: int) -> MemoryPlan | None:
    """Plan with as many slots for experts as fit; None if not even those of a layer do, or no layer has any.

    Parameters
    ----------
    planner : Planner
        Of a graph that may have experts.
    request : Request
    budget : int
        Bytes of the whole process.
    """
    def planned(slots: int) -> MemoryPlan:
        return planner.plan(replace(in_memory(request), expert_slots=slots))

    layers = moes(planner.graph)
    if not layers:
        return None
    least = layers[0][0].pieces
    first = planned(least)
    if first.total_bytes > budget or first.experts is None:
        return None
    one = planned(least + 1).total_bytes - first.total_bytes
    more = min((budget - first.total_bytes) // (one + 64), first.experts.total - least)
    return planned(least + more)


class FromFlash(NamedTuple):
    """Expected reads of a decoded token."""

    hit_rate: float
    """Share of the experts that it goes through that are in memory."""
    nbytes: float
    read_bytes: float
    """Bytes of one of several reads at a time."""


def routing(experts: int, active: int, half: float) -> list[float]:
    """Return the share of tokens that go through each expert of a layer, by a power of its rank.

    The busier half of the experts takes the share `half` of all choices, as far as that can be: no token goes through
    an expert twice.
    """
    if half <= ALIKE:
        return [active / experts] * experts
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        rates = _by_rank(experts, active, middle)
        low, high = (middle, high) if sum(rates[: experts // 2]) < half * active else (low, middle)
    return _by_rank(experts, active, low)


def _by_rank(experts: int, active: int, power: float) -> list[float]:
    """Return rates that fall with the rank; any excess over 1 goes to the others."""
    weights = [(1.0 + rank) ** -power for rank in range(experts)]
    for full in range(min(active, experts - 1)):  # the first ones, which every token takes
        left = (active - full) / sum(weights[full:])
        if weights[full] * left <= 1.0:
            return [1.0] * full + [weight * left for weight in weights[full:]]
    return [1.0] * active + [0.0] * (experts - active)


def from_flash(plan: ExpertsPlan, half: float = ALIKE) -> FromFlash:
    """Return the reads of a token if experts are chosen as `routing` says.

    The cache is taken to hold those that are chosen most, which replacement by counts comes close to; where tokens
    share more with those before them than their rates say, as in real texts, it holds more than that.
    """
    return expected(plan, routing(plan.experts, plan.active, half) * len(plan.layers))


def expected(plan: ExpertsPlan, rates: Sequence[float]) -> FromFlash:
    """Return the reads of a token that goes through each expert of all layers at these rates."""
    wanted = float(sum(rates))
    rate = min(1.0, sum(sorted(rates, reverse=True)[: plan.slots]) / wanted)
    missing = (1 - rate) * wanted / len(plan.layers)
    read = max(MIN_READ_BYTES, min(MAX_READ_BYTES, plan.expert_bytes, missing * plan.expert_bytes / READERS))
    return FromFlash(rate, (1 - rate) * wanted * plan.expert_bytes, read)
