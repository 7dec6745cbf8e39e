"""Runs that fit the memory of a device and of this process: as asked for, with a KV cache that fills it, or smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from edgeinfer.config import CUDA, RuntimeConfig
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.graph import Graph
from edgeinfer.memory_planner import (
    Alternative,
    MemoryPlan,
    Request,
    budget_of,
    draft_config,
    fill_budget,
    fills,
    largest,
    largest_pool,
    own_pool,
    pool_error,
    resolve,
    serving_share,
    to_request,
)

from .devices import Provider
from .driver import gpu_free_bytes
from .planning import DevicePlanner, device_planner

BLOCK = 16
"""Tokens in which contexts that fit are given."""
Fits = Callable[[MemoryPlan], bool]


def memory_of(provider: Provider, config: RuntimeConfig) -> tuple[int, int | None]:
    """Return the memory that this process may take, and its share of the device's; None if that is this process,
    or no GPU is found here.
    """
    host = budget_of(config)
    if provider.device != CUDA:
        return host, None
    try:
        return host, serving_share(gpu_free_bytes()) if fills(config) else gpu_free_bytes()
    except UsageError:  # a run is refused before it plans
        return host, None


def device_fits(plan: MemoryPlan, host: int | None, device: int | None) -> bool:
    """Return whether a plan is within the memory of the process and of its device, of which None is not known."""
    return (host is None or plan.total_bytes <= host) and (device is None or plan.device_bytes <= device)


def fit_device(planner: DevicePlanner, config: RuntimeConfig, draft_plan: MemoryPlan | None = None) -> MemoryPlan:
    """Plan a run within the memory of this process and of its device, with room for a draft.

    Raises
    ------
    BudgetError
        It does not fit; the sentence has alternatives.
    """
    config = replace(resolve(config, planner.config), outputs=config.outputs)  # fewer sequences need fewer
    host, device = memory_of(planner.provider, config)

    def both(plan: MemoryPlan) -> MemoryPlan:
        return plan.with_draft(draft_plan) if draft_plan else plan

    def fits(other: MemoryPlan) -> bool:
        return device_fits(both(other), host, device)

    if error := pool_error(planner.plan, config, host):
        raise error
    plan = fill_device(planner, config, fits)
    if fits(plan):
        return plan
    options = list(smaller(planner, config, fits))
    plan = both(plan)
    raise BudgetError(planner.refusal(plan, host, device, options), plan, host, tuple(options), device)


def fill_device(planner: DevicePlanner, config: RuntimeConfig, fits: Fits) -> MemoryPlan:
    """Plan a run whose KV cache gets the rest of memory, if it is to fill it: pages, or slots for as many sequences."""
    if not fills(config) or planner.paged:
        return fill_budget(planner.plan, config, fits, planner.positions(to_request(config)))
    slots = max(1, most_sequences(planner, config, fits, config.max_sequences))
    return planner.plan(to_request(replace(config, max_sequences=slots)))


def draft_planner(planner: DevicePlanner, config: RuntimeConfig, draft: Graph) -> tuple[DevicePlanner, RuntimeConfig]:
    """Return the planner of a draft model on the device of a model, whose settings have no open fields, and its own."""
    own = replace(draft_config(planner.plan(to_request(config)), 1), budget_bytes=config.budget_bytes,
                  threads=config.threads, kv_layout=config.kv_layout)
    return device_planner(draft, own, planner.provider, own.kv)


def check_draft(config: RuntimeConfig, device: str) -> None:
    """Raise `UsageError` for a KV cache that fills the memory of a device, of which a draft model needs a part."""
    if fills(config):
        raise UsageError(f"A KV cache that fills the memory of device {device} leaves none to a draft model; limit it "
                         "(--kv-memory with --kv-layout pages), or omit --draft.")


def smaller(planner: DevicePlanner, config: RuntimeConfig, fits: Fits) -> Iterator[Alternative]:
    """Yield smaller requests that fit: a smaller KV pool if its size was given, else a shorter context, or fewer
    samples where they are requested.

    Beams, whose own tokens are planned, stay: fewer would be another search.
    """
    def placed(request: Request) -> MemoryPlan | None:
        return plan if fits(plan := planner.plan(request)) else None

    request = to_request(config)
    if own_pool(config):
        if pool := largest_pool(placed, request, planner.plan(request).region("kv").nbytes):
            own = replace(config, kv_tokens=None, kv_memory=pool)
            yield Alternative({"kv_memory": pool}, planner.plan(to_request(own)).total_bytes)
        return
    filling = fills(config)
    if filling and not planner.paged:
        config = replace(config, max_sequences=1)
    longest = min(int(config.ctx or 0), planner.config.max_position_embeddings)
    if ctx := longest_ctx(planner, config, fits, longest):
        yield Alternative({"ctx": ctx}, planner.plan(to_request(config, ctx)).total_bytes)
    if config.own_tokens is not None or filling:
        return
    if fewer := most_sequences(planner, config, fits, config.max_sequences - 1):
        plan = planner.plan(to_request(replace(config, max_sequences=fewer)))
        yield Alternative({"samples": fewer}, plan.total_bytes)


def longest_ctx(planner: DevicePlanner, config: RuntimeConfig, fits: Fits, at_most: int) -> int:
    """Return the longest context that fits: `at_most`, or a multiple of 16 below, or 0."""
    if fits(planner.plan(to_request(config, at_most))):
        return at_most
    return BLOCK * largest(lambda blocks: fits(planner.plan(to_request(config, BLOCK * blocks))),
                           (at_most - 1) // BLOCK)


def most_sequences(planner: DevicePlanner, config: RuntimeConfig, fits: Fits, at_most: int = 64) -> int:
    """Return how many sequences of this context fit."""
    found = 0
    while found < at_most and fits(planner.plan(to_request(replace(config, max_sequences=found + 1)))):
        found += 1
    return found
