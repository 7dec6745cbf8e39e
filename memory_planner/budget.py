"""What the machine can give: memory and cores, within its container's limits; and the check of a plan against it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from edgeinfer.errors import BudgetError
from edgeinfer.graph import Graph

from .plan import MemoryPlan, make_plan

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that the system can really give now: free and reclaimable, and not above the container's limit."""
    import psutil

    available = psutil.virtual_memory().available
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return int(available)


def default_threads() -> int:
    """Physical cores that affinity and the container's CPU quota allow."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(allowed, psutil.cpu_count(logical=False) or allowed)
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            threads = min(threads, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group: nothing limits the process further
    return max(1, threads)


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
    needs = f"The run needs {plan.total_bytes / 1e9:.2f} GB and the budget is {budget / 1e9:.2f} GB."
    raise BudgetError(needs + advice, plan)


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
    """Largest context (a multiple of 256, below the one asked for) that fits, or 0."""
    low, high = 0, plan.request.ctx // 256
    while low < high:
        middle = (low + high + 1) // 2
        request = replace(plan.request, ctx=256 * middle, kv=kv)
        if make_plan(graph, request, weight_bytes).total_bytes <= budget:
            low = middle
        else:
            high = middle - 1
    return 256 * low


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
