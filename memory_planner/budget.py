"""Available memory and cores of the machine, within its container's limits."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from edgeinfer.base.process import usable_cores

from . import cgroup

CHARGE_BATCH_BYTES = 64 * 4096
"""Taken from a control group's limit at once, per processor (the kernel's MEMCG_CHARGE_BATCH)."""


def available_bytes() -> int:
    """Memory that the system can really give now: free and reclaimable, and not above the container's limit."""
    available = _system_available()
    left = cgroup.memory_left()
    return available if left is None else min(available, left)


def process_budget() -> int:
    """Most memory that this whole process can hold: the available memory, and the memory that the process has already.

    Linux charges control groups in batches, so that their use is counted that much too high.
    """
    return available_bytes() + own_bytes() + CHARGE_BATCH_BYTES * (os.cpu_count() or 1)


def serving_share(nbytes: int) -> int:
    """Part of the memory that there is for a run that takes all it can get: a tenth is left to other programs."""
    return nbytes * 9 // 10


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
    allowed = usable_cores()
    threads = min(allowed, _physical_cores() or allowed)
    quota = cgroup.cpu_quota()
    return max(1, threads if quota is None else min(threads, math.ceil(quota)))


def _system_available() -> int:
    """Return the available memory as psutil reports it; read here on Linux, because importing psutil takes longer than
    the rest of the planner.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import psutil

    return int(psutil.virtual_memory().available)


def _physical_cores() -> int | None:
    """Return the number of physical cores as psutil reports it; read here on Linux, as above."""
    cores = set()
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/core_cpus_list"):
        with contextlib.suppress(OSError):  # a core may be taken away meanwhile
            cores.add(file.read_text().strip())
    if cores:
        return len(cores)
    import psutil

    found: int | None = psutil.cpu_count(logical=False)
    return found
