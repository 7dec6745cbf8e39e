"""The speed of this process and the load of its machine, so that limits in seconds hold on slow and busy ones too."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROUNDS, QUIET_SECONDS = 1_000_000, 0.09
"""A loop, and its processor time on the machine that limits are stated for (Emerald Rapids, Python 3.11)."""
READINGS = 3


def slowness() -> float:
    """Return how many times as long as there the loop takes here and now; at least 1."""
    return max(1.0, *(_loop() / QUIET_SECONDS for _ in range(READINGS)))


def _loop() -> float:
    began, total = time.process_time(), 0
    for i in range(ROUNDS):
        total = (total * 3 + i) & 0xFFFF
    return time.process_time() - began


def state() -> str:
    """Return the load of the machine in words."""
    load, memory = ", ".join(f"{one:.1f}" for one in psutil.getloadavg()), psutil.virtual_memory()
    return f"load average {load} on {psutil.cpu_count()} cores; {memory.available / 1e9:.1f} of " \
        f"{memory.total / 1e9:.1f} GB of memory available"


class Others:
    """Processor time that other programs take while something runs, other guests of the host among them."""

    def __init__(self) -> None:
        self._began, self._busy, self._own, self._throttled = time.monotonic(), _busy(), _own(), _throttled()

    def share(self) -> float:
        """Return their share of the time of all cores so far; 1 if the system held this process back by a quota."""
        if _throttled() > self._throttled:
            return 1.0
        seconds = (psutil.cpu_count() or 1) * (time.monotonic() - self._began)
        return max(0.0, (_busy() - self._busy) - (_own() - self._own)) / seconds


def _busy() -> float:
    """Return the seconds that all cores have worked, or were taken by other guests."""
    times = psutil.cpu_times()
    return sum(times) - sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))


def _own() -> float:
    """Return the processor time of this process and those that it has started."""
    seconds = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ends meanwhile
            seconds += sum(child.cpu_times()[:4])
    return seconds


def _throttled() -> int:
    """Return how often a quota of processor time held this control group back."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/sys/fs/cgroup/cpu.stat").read_text().split("nr_throttled")[1].split()[0])
    return 0
