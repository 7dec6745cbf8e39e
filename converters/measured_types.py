"""Types by size, chosen once more by the divergence that was measured with each of them.

Costs of single matrices add up where errors are small. In a model of some hundred thousand weights they do not: there
each matrix gets each type in turn, all others as they were chosen, and the differences are the costs of another choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.graph import Graph
from edgeinfer.quant import WeightType

from .bit_budget import BitBudget, possible_types
from .chosen_types import ChosenTypes
from .knapsack import choose
from .packing import WeightReader

ROUNDS = 2
"""Times that all types are measured; a third time changed little for stories260K."""
NEAR = 0.6
"""Least share of bytes that a type and the chosen one have in common, to be tried in its place."""
Divergence = Callable[[ChosenTypes], float]


def types_by_divergence(budget: BitBudget, reading: WeightReader, graph: Graph, chosen: ChosenTypes,
                        divergence: Divergence, progress: OnStageProgress | None = None) -> ChosenTypes:
    """Choose types of no more bytes by measured divergence.

    Parameters
    ----------
    budget : that `chosen` is from
    divergence : converts with some types, and returns the mean divergence of predictions
    progress : called with (done, total, item) in types
    """
    weights = {weight.name: weight for weight in graph.weights if weight.name in chosen.types}
    possible = {name: possible_types(reading, weight) for name, weight in weights.items()}
    least = divergence(chosen)
    for number in range(ROUNDS):
        names, options = list(weights), list[list[tuple[WeightType, int, float]]]()
        for done, name in enumerate(names):
            own = chosen.types[name].nbytes(weights[name].shape)
            sizes = [(stored, stored.nbytes(weights[name].shape)) for stored in possible[name]]
            options.append([(stored, nbytes, 0.0 if stored == chosen.types[name] else
                             divergence(_with(chosen, {name: stored})) - least)
                            for stored, nbytes in sizes if NEAR * own <= nbytes <= own / NEAR])
            if progress:
                progress(number * len(names) + done + 1, ROUNDS * len(names), name)
        lowest = [min(cost for *_, cost in each) for each in options]
        taken = sum(stored.nbytes(weights[name].shape) for name, stored in chosen.types.items())
        limit = taken if budget.bits is None else budget.limit(graph, list(weights.values()))
        choice = choose([[(nbytes, cost - low) for _, nbytes, cost in each]
                         for each, low in zip(options, lowest, strict=True)], limit)
        new = _with(chosen, {name: each[option][0]
                             for name, each, option in zip(names, options, choice.options, strict=True)})
        if not budget.holds(graph, new.types) or (found := divergence(new)) >= least:
            break
        chosen, least = new, found
    return replace(chosen, gap=None, cost=least)


def _with(chosen: ChosenTypes, types: Mapping[str, WeightType]) -> ChosenTypes:
    return replace(chosen, types={**chosen.types, **types})
