"""The graph and the memory plan of a run, from a bundle and a config; `Session` and the planner both start here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig, check_own_layout
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.graph import LAYER_RANGE, Graph, TypeOf, build_graph, expected_types, without_approximations
from edgeinfer.memory_planner import (
    Alternative,
    DraftMemory,
    MemoryPlan,
    Placer,
    Planner,
    alternatives,
    fit,
    fits,
    own_pool,
    refusal,
    resolve,
)
from edgeinfer.registry import in_use

from .sparse_fallback import SparseFfn, decide, everywhere


class PlannedRun(NamedTuple):
    """A run that is planned but not loaded."""

    config: RuntimeConfig
    """Settings of the run, completed."""
    recipe: Recipe
    """Recipe with the bundle's predictor, and the layers that fall back."""
    sparse: SparseFfn | None
    graph: Graph
    plan: MemoryPlan
    budget_bytes: int
    smaller_alternative: Alternative | None
    """First smaller request that would fit with all weights in memory, if they do not."""


def plan_run(bundle: Bundle, config: RuntimeConfig, placer: Placer | None = None,
             draft_memory: DraftMemory | None = None) -> PlannedRun:
    """Plan a run.

    Parameters
    ----------
    bundle : Bundle
    config : RuntimeConfig
    placer : callable, optional
        Chooses the weights that stay in memory if not all fit; without it layers are streamed (`offload.placer` of the
        bundle).
    draft_memory : DraftMemory, optional
        Draft that runs in the same process, within the same budget.

    Raises
    ------
    BudgetError
        If no plan fits the budget.
    BundleError
        If a tensor or a part differs from the needs of the model's graph.
    UsageError
        If KV is to be in slots.
    """
    check_own_layout(config)
    config = resolve(config, bundle.config)
    recipe, sparse, graph, planner = _graph(bundle, config.recipe, draft_memory)
    placed = placer is not None and sparse is not None and sparse.mode == "predict" and sparse.sentence()
    if placed and not fits(planner, config):  # masks place neurons, in every layer
        recipe, sparse, graph, planner = _graph(bundle, everywhere(config.recipe), draft_memory)
    rebuild = partial(_rebuilt, bundle, recipe)
    try:
        plan, budget = fit(planner, config, rebuild, placer)
    except BudgetError as error:
        raise or_exact(error, config, lambda exact: plan_run(bundle, exact, placer, draft_memory).plan) from None
    whole = not plan.parts and plan.cold is None and plan.experts is None
    smaller_alternative = None if whole else next(alternatives(planner, config, budget, rebuild), None)
    return PlannedRun(config, recipe, sparse, graph, plan, budget, smaller_alternative)


def or_exact(error: BudgetError, config: RuntimeConfig, plan_of: Callable[[RuntimeConfig], MemoryPlan]) -> BudgetError:
    """Return why a run does not fit, adding the exact run as an alternative if it fits; if nothing fits, smaller
    settings of the exact run. `plan_of` plans it and raises `BudgetError`.
    """
    exact = without_approximations(config.recipe)
    if exact == config.recipe:
        return error
    left_out: dict[str, str | int] = {step.name: "exact" for step in config.recipe.steps if step not in exact.steps}
    kept: tuple[Alternative, ...] = error.alternatives  # type: ignore[assignment]
    try:
        found = plan_of(replace(config, recipe=exact))
        options = [Alternative(left_out, found.total_bytes, found.streamed_bytes), *kept]
    except BudgetError as other:
        smaller: tuple[Alternative, ...] = () if kept else other.alternatives  # type: ignore[assignment]
        options = [*kept, *(replace(one, options=left_out | one.options) for one in smaller)]
    plan: MemoryPlan = error.plan  # type: ignore[assignment]
    return BudgetError(refusal(plan, error.budget_bytes or 0, options), plan, error.budget_bytes, tuple(options))


def offsets_of(bundle: Bundle) -> dict[str, int]:
    """Return the offset of each tensor in its file."""
    return {name: entry.offset for name, entry in bundle.tensors.items()}


def planner_of(bundle: Bundle, recipe: Recipe | None = None) -> Planner:
    """Return a planner of a bundle that is run with a recipe."""
    return _graph(bundle, recipe or Recipe(), None)[-1]


def _graph(bundle: Bundle, asked: Recipe,
           draft_memory: DraftMemory | None) -> tuple[Recipe, SparseFfn | None, Graph, Planner]:
    recipe, sparse = decide(asked, bundle)
    types, whole = expected_types(bundle.types), recipe.replacing(LAYER_RANGE, None)
    graph = build_graph(bundle.config, types, recipe)
    bundle.check_graph(build_graph(bundle.config, types, whole) if graph.layers else graph)
    return recipe, sparse, graph, Planner(graph, bundle.weights_bytes, offsets_of(bundle), draft_memory)


def _rebuilt(bundle: Bundle, recipe: Recipe, types: TypeOf) -> Graph:
    """The model's graph with weights stored in another way."""
    return build_graph(bundle.config, types, recipe)


def check_stage_config(config: RuntimeConfig) -> None:
    """Raise `UsageError` for settings that a range of layers cannot have."""
    usual = {step.name for step in Recipe().steps}
    further = [step.name for step in config.recipe.steps if step.name not in usual]
    if named := [*(one for one, _ in in_use(config)), *further]:
        raise UsageError(f"A model that is split between processes cannot run with {named[0]}; leave it out.")
    if config.kv_memory is not None or (config.fill_budget and not own_pool(config)):
        raise UsageError("The KV cache of a model that is split between processes is sized by its tokens, because its "
                         "layers' memory differs; leave out --kv-memory.")
