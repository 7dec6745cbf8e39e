"""What the machine can give: memory and cores, within its container's limits."""

from __future__ import annotations

import math
import os

from . import cgroup

CHARGE_BATCH_BYTES = 64 * 4096
"""Taken from a control group's limit at once, per processor (the kernel's MEMCG_CHARGE_BATCH)."""


def available_bytes() -> int:
    """Memory that the system can really give now: free and reclaimable, and not above the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = cgroup.memory_left()
    return available if left is None else min(available, left)


def process_budget() -> int:
    """Most memory that this whole process can hold: what the system can give now, and what the process has already.

    Linux charges control groups in batches, so that what they have used is counted that much too high.
    """
    return available_bytes() + own_bytes() + CHARGE_BATCH_BYTES * (os.cpu_count() or 1)


def own_bytes() -> int:
    """Memory that this process holds by itself, without pages of files."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import psutil

    return int(psutil.Process().memory_info().rss)


def default_threads() -> int:
    """Physical cores that affinity and the container's CPU quota allow."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(allowed, psutil.cpu_count(logical=False) or allowed)
    quota = cgroup.cpu_quota()
    return max(1, threads if quota is None else min(threads, math.ceil(quota)))
