"""Choice of the neurons that stay in memory: for each layer the hottest blocks, by bytes of reading saved per byte
held.

Neurons of a model are of one size and stored from the hottest to the coldest, so the benefit of a layer's blocks falls
from one to the next, and taking the best remaining block of any layer is optimal: the cost is a separable convex
function of the number of blocks that each layer keeps. PowerInfer's integer program (arXiv 2312.12456) sums sorted
frequencies to the same effect.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Bundle, Statistics, read_statistics
from edgeinfer.memory_planner import ColdPlan, MemoryPlan, Planner, Request, in_memory, masked

from .prediction import Floats

TOKENS_KEPT = 2
"""Tokens whose cold neurons the cache holds, beside those of a prompt: with less than one it holds nothing when a
layer's turn comes again, and beyond two the same bytes save more as resident neurons (docs/explanation/offload.md)."""
MAX_CACHE = 0.25
"""Largest share of the memory left for neurons that this cache takes."""


@dataclass(frozen=True)
class Heat:
    """Frequency of neurons: the mean number computed for a token in each block, layer by layer."""

    blocks: tuple[Floats, ...]
    """Falling, as greedy choice needs it: a block counts for no more than those before it, by neuron. Layers in tiles,
    which stay whole, have none."""
    sizes: NDArray[np.int64]
    """Neurons of each block."""

    @classmethod
    def of(cls, statistics: Statistics | None, plan: ColdPlan) -> Heat:
        """Return the rates that a bundle's statistics say; without any all neurons are alike."""
        starts = np.arange(0, plan.neurons, plan.block)
        sizes = np.diff([*starts, plan.neurons])
        if statistics is None:
            rates = [np.ones(len(sizes))] * len(plan.hot)
        else:
            rates = [np.add.reduceat(fired, starts) / statistics.tokens / sizes for fired in statistics.fired]
        none = np.zeros(0)
        return cls(tuple(np.minimum.accumulate(rate) * sizes if hot < plan.neurons else none
                         for rate, hot in zip(rates, plan.hot, strict=True)), sizes)

    def cold(self, hot: Sequence[int]) -> float:
        """Return the mean number of neurons for a token that are computed and not resident."""
        ends = np.cumsum(self.sizes)
        return float(sum(blocks[ends > n].sum() for blocks, n in zip(self.blocks, hot, strict=True) if len(blocks)))


def choose(heat: Heat, most: int) -> tuple[int, ...]:
    """Return how many neurons of each layer to keep, the hottest blocks first, `most` neurons in all."""
    ends = np.cumsum(heat.sizes)
    hot = [0 if len(blocks) else int(ends[-1]) for blocks in heat.blocks]
    left = [(-blocks[0] / heat.sizes[0], 0, layer) for layer, blocks in enumerate(heat.blocks) if len(blocks)]
    heapq.heapify(left)
    while left:
        _, block, layer = heapq.heappop(left)
        size = int(heat.sizes[block])
        if size <= most:
            most, hot[layer], block = most - size, int(ends[block]), block + 1
            if block < len(ends):
                heapq.heappush(left, (-heat.blocks[layer][block] / heat.sizes[block], block, layer))
    return tuple(hot)


def hot_and_cold(statistics: Statistics | None, planner: Planner, request: Request, budget: int) -> MemoryPlan | None:
    """Plan with the hottest neurons in memory and a cache of the others; None if not even the cache fits.

    Parameters
    ----------
    statistics : Statistics or None
    planner : Planner
        Of a graph whose FFNs have masks.
    request : Request
    budget : int
        Bytes of the whole process.
    """
    layers = {ffn.layer for ffn in masked(planner.graph)}

    def planned(hot: tuple[int, ...], slots: int) -> MemoryPlan:
        return planner.plan(replace(in_memory(request), hot=hot, slots=slots))

    whole = masked(planner.graph)[0].pieces
    none = tuple(0 if i in layers else whole for i in range(planner.graph.config.num_hidden_layers))
    empty = ColdPlan.of(planner.graph, none, 1)
    heat, best = Heat.of(statistics, empty), None
    fixed = planned(empty.hot, empty.least_slots).total_bytes - empty.least_slots * empty.cluster_bytes
    least, kept = empty.least_slots, 0.0
    for _ in range(6):  # the resident layers and the size of the cache depend on each other
        room = budget - fixed
        slots = max(least, min(round(kept), int(MAX_CACHE * room) // empty.cluster_bytes))
        hot = choose(heat, (room - slots * (empty.cluster_bytes + 64)) // empty.neuron_bytes)
        chosen = replace(empty, hot=hot, slots=slots)
        if slots >= chosen.least_slots and min(hot) < empty.neurons \
                and (plan := planned(hot, slots)).total_bytes <= budget:
            best = plan
        least, kept = chosen.least_slots, TOKENS_KEPT * heat.cold(hot) / (1 << empty.shift)
    return best


def place_neurons(bundle: Bundle, planner: Planner, request: Request, budget: int) -> MemoryPlan | None:
    """Plan with hot neurons in memory and cold ones in storage, by a bundle's statistics; see `hot_and_cold`.

    There is no such plan for graphs without masks in every FFN by neuron: dense and exact runs compute the gates of all
    neurons, so streaming reads no more than they need.
    """
    every = all(ffn.chosen for ffn in planner.graph.on_demand("neurons"))
    return hot_and_cold(read_statistics(bundle), planner, request, budget) if every else None
