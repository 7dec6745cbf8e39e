"""The machine that measures: what it is, and how much of it others take meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil

T = TypeVar("T")
CALM = 0.03
"""Share of the processors' time that the host may give to its other guests in a round that counts."""


def describe() -> dict[str, str]:
    """Processor, cores, memory, system: what a reader needs to compare figures."""
    return {
        "processor": _processor(), "cores": f"{psutil.cpu_count(logical=False)} cores, {os.cpu_count()} threads",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory",
        "system": f"{platform.system()} on {platform.machine()}", "python": f"Python {platform.python_version()}",
    }


def _processor() -> str:
    fields = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux
    name = fields.get("model name") or platform.processor() or platform.machine()
    if {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


class Others:
    """How many cores everybody else used while a process worked, the hypervisor's other guests included.

    Parameters
    ----------
    pid : int
        The process whose own time does not count.
    """

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def cores(self) -> float:
        """Mean number of cores since this object was made."""
        elapsed = time.perf_counter() - self._began
        return max(0.0, _busy_seconds() - self._busy - (self._own_seconds() - self._own)) / elapsed

    def _own_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def _busy_seconds(nice: bool = True) -> float:
    """Seconds that all cores have worked, without or with what runs at a lower priority."""
    times = psutil.cpu_times()
    left_out = ["idle", "iowait", "guest", "guest_nice"] + ([] if nice else ["nice"])  # guests are in user and nice
    return sum(times) - sum(getattr(times, name, 0.0) for name in left_out)


def wait_for_calm(patience: float, most_cores: float) -> bool:
    """Wait until others use little of the machine, at most `patience` seconds; returns whether they do.

    Work at a lower priority does not count: it gives way.
    """
    deadline = time.perf_counter() + patience
    while True:
        before = _busy_seconds(nice=False)
        time.sleep(0.3)
        if (_busy_seconds(nice=False) - before) / 0.3 <= most_cores:
            return True
        if time.perf_counter() >= deadline:
            return False


@dataclass
class Rounds(Generic[T]):
    """What rounds of a measurement gave, how many were tried, and the most that others had of one that counts."""

    results: list[T]
    tried: int
    taken: float

    def __str__(self) -> str:
        return (f"{len(self.results)} of {self.tried} rounds, during which the host took at most "
                f"{100 * self.taken:.0f} % of the processors' time")


def calm_rounds(once: Callable[[], T], rounds: int, patience: float) -> Rounds[T]:
    """Repeat a measurement until so many rounds were left alone by the host's other guests.

    After `patience` seconds the least disturbed of the others make up the number.
    """
    found: list[tuple[float, int, T]] = []
    deadline = time.perf_counter() + patience
    while sum(taken <= CALM for taken, *_ in found) < rounds:
        if len(found) >= rounds and time.perf_counter() > deadline:
            break
        began, taken = time.perf_counter(), _taken_seconds()
        result = once()
        elapsed = time.perf_counter() - began
        found.append(((_taken_seconds() - taken) / elapsed / (os.cpu_count() or 1), len(found), result))
    best = sorted(found, key=lambda each: each[:2])[:rounds]
    in_order = sorted(best, key=lambda each: each[1])
    return Rounds([result for *_, result in in_order], len(found), best[-1][0])


def _taken_seconds() -> float:
    """Seconds that the host kept for itself and other guests."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
