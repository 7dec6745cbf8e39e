"""Fitting a run into its budget, and the refusal of one that does not fit."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.base.units import format_size
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BudgetError

from .alternatives import Alternative, Placer, Rebuild, alternatives, streaming, without
from .plan import MemoryPlan
from .planner import Planner
from .pool_budget import fill_budget, pool_error, within
from .request import budget_of, to_request
from .stream_layers import stream


def fits(planner: Planner, config: RuntimeConfig) -> bool:
    """Return whether a run has all weights in memory within its budget."""
    return within(planner, to_request(config), budget_of(config)) is not None


def fit(planner: Planner, config: RuntimeConfig, rebuild: Rebuild,
        placer: Placer | None = None) -> tuple[MemoryPlan, int]:
    """Plan a run within its budget: with all weights in memory, else as `placer` finds, else with streamed layers.

    Parameters
    ----------
    planner : Planner
    config : RuntimeConfig
        Without open fields but its budget: None is the available memory.
    rebuild : callable
    placer : callable, optional

    Returns
    -------
    plan : MemoryPlan
    budget : int
        That was applied, in bytes.

    Raises
    ------
    BudgetError
        With alternatives that were checked to fit; it carries the plan.
    RequestError
        The draft cannot run beside the model with this plan.
    """
    budget = budget_of(config)
    if error := pool_error(planner.plan, config, budget):
        raise error
    if found := fitting(planner, config, budget, placer):
        if planner.draft_memory:
            planner.draft_memory.check(found)
        return found, budget
    plan = planner.plan(to_request(config))
    if fewer := without(planner, config, budget):
        options = [fewer, *alternatives(planner, config, budget, rebuild)]
        raise BudgetError(refusal(plan, budget, options), plan, budget, tuple(options))
    options = [*alternatives(planner, config, budget, rebuild), *filter(None, [streaming(planner, config, budget)])]
    raise BudgetError(refusal(plan, budget, options), plan, budget, tuple(options))


def fitting(planner: Planner, config: RuntimeConfig, budget: int, placer: Placer | None = None) -> MemoryPlan | None:
    """Return the plan of a run within a budget, as `fit` does, or None."""
    def filled(state_memory: int | None) -> MemoryPlan:
        return fill_budget(planner.plan, replace(config, state_memory=state_memory),
                           lambda plan: plan.total_bytes <= budget)

    if (plan := filled(config.state_memory)).total_bytes <= budget:
        return plan
    if fewer := within(planner, plan.request, budget):  # rather than to read weights from storage
        return filled(fewer.request.state_memory)
    if without(planner, config, budget):
        return None
    found = placer(planner, plan.request, budget) if placer else None
    if placer and not found and plan.state and config.state_memory is None:
        found = placer(planner, replace(plan.request, state_memory=0), budget)
    return found or stream(planner, plan.request, budget)


def refusal(plan: MemoryPlan, budget: int, options: list[Alternative]) -> str:
    """Return the sentence for a plan that does not fit."""
    needs, has = format_size(plan.total_bytes), format_size(budget)
    if needs == has:
        needs, has = f"{plan.total_bytes:,} bytes", f"{budget:,} bytes"
    own = sum(region.bytes for region in plan.regions if region.name == "python")
    advice = f"edgeinfer itself takes {format_size(own)} of that, so no model fits; raise --budget."
    if options:
        stored = any("weights" in option.options for option in options)
        how = " (--weights takes a checkpoint or GGUF file, not a bundle)" if stored else ""
        advice = f"It fits with {', or with '.join(map(str, options))}{how}."
    elif budget > own:
        advice = "No smaller setting of this model fits; use a smaller model or raise --budget."
    return f"The run needs {needs}, and the budget is {has}. {advice}"
