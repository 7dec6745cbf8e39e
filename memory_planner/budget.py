"""What the machine can give: memory and cores, within its container's limits; and the check of a plan against it."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from edgeinfer.errors import BudgetError
from edgeinfer.graph import Graph

from . import cgroup
from .plan import MemoryPlan, make_plan


def available_bytes() -> int:
    """Memory that the system can really give now: free and reclaimable, and not above the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = cgroup.memory_left()
    return available if left is None else min(available, left)


def default_threads() -> int:
    """Physical cores that affinity and the container's CPU quota allow."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(allowed, psutil.cpu_count(logical=False) or allowed)
    quota = cgroup.cpu_quota()
    return max(1, threads if quota is None else min(threads, math.ceil(quota)))


def check_budget(graph: Graph, plan: MemoryPlan, weight_bytes: int, budget_bytes: int | None) -> int:
    """Refuse a plan that exceeds the budget.

    Parameters
    ----------
    budget_bytes : int or None
        Limit of the whole process; None is what the system can give now.

    Returns
    -------
    int
        The budget that was applied, in bytes.

    Raises
    ------
    BudgetError
        With alternatives that were checked to fit; it carries the plan.
    """
    budget = available_bytes() if budget_bytes is None else budget_bytes
    if plan.total_bytes <= budget:
        return budget
    options = alternatives(graph, plan, weight_bytes, budget)
    advice = " Fits: " + "; ".join(options) + "." if options else \
        " Nothing smaller in this model fits; convert it with fewer bits per weight or take a smaller model."
    needs, has = next((needs, has) for digits in (2, 3, 6, 9)
                      if (needs := f"{plan.total_bytes / 1e9:.{digits}f}") != (has := f"{budget / 1e9:.{digits}f}"))
    raise BudgetError(f"The run needs {needs} GB and the budget is {has} GB.{advice}", plan)


def alternatives(graph: Graph, plan: MemoryPlan, weight_bytes: int, budget: int) -> list[str]:
    """Smaller requests that fit, in the order in which they cost quality: context, KV type, both."""
    request = plan.request
    out = []
    if ctx := _largest_ctx(graph, plan, weight_bytes, budget, request.kv):
        out.append(f"--ctx {ctx}")
    if request.kv != "int8":
        small = replace(request, kv="int8")
        if make_plan(graph, small, weight_bytes).total_bytes <= budget:
            out.append("--kv int8")
        elif ctx := _largest_ctx(graph, plan, weight_bytes, budget, "int8"):
            out.append(f"--kv int8 --ctx {ctx}")
    return out


def _largest_ctx(graph: Graph, plan: MemoryPlan, weight_bytes: int, budget: int, kv: str) -> int:
    """Largest context below the one asked for that fits, or 0: a multiple of 256, or of 16 where it is short."""
    low, high = 0, (plan.request.ctx - 1) // 16
    while low < high:
        middle = (low + high + 1) // 2
        request = replace(plan.request, ctx=16 * middle, kv=kv)
        if make_plan(graph, request, weight_bytes).total_bytes <= budget:
            low = middle
        else:
            high = middle - 1
    return 16 * low if low < 64 else 256 * (low // 16)
