"""Host functions that the walking threads call by address, and how long they spin before they sleep."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

FUTEX = {"x86_64": 202, "aarch64": 98}
"""Linux system call numbers of futex."""
SPINS, SPINS_CROWDED = 1000, 50
"""Turns of the spin loop before sleeping: with a core per thread, and with more threads than cores."""


def host_functions() -> dict[str, int]:
    """Addresses and numbers for ctx: futex (Linux), yield, clock_gettime; 0 where the system has none."""
    out = {"futex": 0, "futex_number": 0, "yield": 0, "clock": 0}
    if sys.platform == "win32":
        kernel32 = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
        out["yield"] = _address(kernel32.SwitchToThread)
        return out
    libc = ctypes.CDLL(None)
    out["yield"], out["clock"] = _address(libc.sched_yield), _address(libc.clock_gettime)
    number = FUTEX.get(platform.machine())
    if sys.platform.startswith("linux") and number:
        out["futex"], out["futex_number"] = _address(libc.syscall), number
    return out


def spins(threads: int) -> int:
    """Turns before sleeping for so many threads on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SPINS if threads <= cores else SPINS_CROWDED


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
