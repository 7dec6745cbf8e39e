"""A KV pool of its own size, and checkpoints of recurrent state: the rest of the budget, and fewer that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from edgeinfer.base.units import format_size
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BudgetError
from edgeinfer.kernels import abi

from .kv_pool import largest, pool_sizes
from .plan import MemoryPlan, Request
from .planner import Planner
from .request import fills, to_request
from .state import too_small

PlanOf = Callable[[Request], MemoryPlan]
"""Plans a request: `Planner.plan`, or that of another device's planner."""
Planned = TypeVar("Planned")
PAGE_BYTES = 4096
"""Unit of pools that are offered."""


def fill_budget(plan_of: Callable[[Request], Planned], config: RuntimeConfig, fits: Callable[[Planned], bool],
                block_tokens: int = abi.BLOCK_TOKENS) -> Planned:
    """Plan a run whose KV pool gets the rest of the budget: from one context to one for each sequence.

    Parameters
    ----------
    plan_of : callable
        Plans a request: the model, or all parts that it is divided into.
    config : RuntimeConfig
        Without open fields. If it gives the pool a size, or is not to fill the budget, it is planned as it is.
    fits : callable
        Says whether a plan is within the budget.
    block_tokens : int
        Tokens of a block.

    Returns
    -------
    Planned
        Result of `plan_of`; its `fits` is false if the pool of one context does not fit.
    """
    request = to_request(config)
    plan = plan_of(request)
    if not fills(config) or not fits(plan):
        return plan

    def of(blocks: int, windows: int) -> Planned:
        return plan_of(request.of_pool(blocks, windows, block_tokens))

    most = request.full_pool.blocks_of(block_tokens)
    return of(*pool_sizes(lambda *sizes: fits(of(*sizes)), request, most, block_tokens))


def largest_pool(place: Callable[[Request], MemoryPlan | None], request: Request, most: int) -> int:
    """Return the bytes, fewer than `most`, of the largest KV pool for which `place` finds a plan; 0 for none."""
    def fits(pages: int) -> bool:
        plan = place(replace(request, kv_tokens=None, kv_memory=pages * PAGE_BYTES))
        return plan is not None and plan.region("kv").nbytes <= pages * PAGE_BYTES

    return PAGE_BYTES * largest(fits, (most - 1) // PAGE_BYTES)


def within(planner: Planner, request: Request, budget: int) -> MemoryPlan | None:
    """Plan a request within a budget; None if it does not fit.

    Without --state-memory the plan may have fewer checkpoints than the default.
    """
    if (plan := planner.plan(request)).total_bytes <= budget:
        return plan
    given = request.state_memory is not None
    return None if given or not plan.state else fewer_checkpoints(planner.plan, request, budget)


def fewer_checkpoints(plan_of: PlanOf, request: Request, budget: int) -> MemoryPlan | None:
    """Plan a request with the most checkpoints of recurrent state that fit the budget; None if it does not fit without
    any."""
    if not (state := (plan := plan_of(request)).state):
        return None
    fewer = state.checkpoints - -(-(plan.total_bytes - budget) // state.slot_bytes)
    if not 0 <= fewer < state.checkpoints:
        return None
    found = plan_of(replace(request, state_memory=fewer * state.slot_bytes))
    return found if found.total_bytes <= budget else None


def pool_error(plan_of: PlanOf, config: RuntimeConfig, budget: int | None) -> BudgetError | None:
    """Return the error for a KV pool in which not one block fits, or state memory in which not one checkpoint does.

    The plan of such a pool has a block all the same.
    """
    if config.kv_memory is None and not config.state_memory:
        return None
    plan = plan_of(to_request(config))
    if said := too_small(plan.state, config.state_memory):
        return BudgetError(said, plan, budget)
    if config.kv_memory is None:
        return None
    if (least := plan.region("kv").nbytes) <= config.kv_memory:
        return None
    said = (f"The KV pool of {format_size(config.kv_memory)} is too small for one block of {plan.request.kv_tokens} "
            f"tokens, which takes {least:,} bytes; raise --kv-memory.")
    return BudgetError(said, plan, budget)
