"""The pool of threads that run, the host functions they call by address, and how long they spin before they sleep."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.base.process import usable_cores
from edgeinfer.errors import ClosedError, EdgeInferError
from edgeinfer.kernels import Kernels, abi

from ..memory import allocate

if TYPE_CHECKING:
    from numpy.typing import NDArray

FUTEX = {"x86_64": 202, "aarch64": 98}
"""Linux system call numbers of futex."""
SPIN_NS, CROWDED_NS = 50_000, 2_000
"""Most time that threads spin before they sleep: with a core for each, longer than waking one takes; with more threads
than cores, because the awaited thread may need this very core, next to nothing."""
RETRY = 16
"""Futile waits after which fewer turns are given up again, at first."""
NAP_NS = 200_000
"""Sleep time of idle threads on systems without a futex."""
EVENT_NS = 5_000_000
"""Longest sleep at a completion event before a forward pass looks whether it is still wanted."""
Entry = Callable[[int, int, int, int], int]
"""A kernel as Python calls it: instruction, ctx, thread, threads."""
_CANCEL, _STOP = abi.CTX_CANCEL >> 3, abi.CTX_STOP >> 3
_HEAD = abi.HEAD_BYTES >> 3


def host_functions() -> dict[str, int]:
    """Addresses and numbers for ctx: futex (Linux), yield, sleep, clock_gettime and the number of its monotonic clock.

    0 if the system has none: Windows has no such clock.
    """
    out = {"futex": 0, "futex_number": 0, "yield": 0, "sleep": 0, "clock": 0, "clock_id": 0}
    if sys.platform == "win32":
        kernel32 = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
        out["yield"], out["sleep"] = _address(kernel32.SwitchToThread), _address(kernel32.Sleep)
        return out
    libc = ctypes.CDLL(None)
    out["yield"], out["clock"] = _address(libc.sched_yield), _address(libc.clock_gettime)
    out["sleep"] = _address(libc.nanosleep)
    out["clock_id"] = time.CLOCK_MONOTONIC  # 1 on Linux, 6 on macOS
    number = FUTEX.get(platform.machine())
    if sys.platform.startswith("linux") and number:
        out["futex"], out["futex_number"] = _address(libc.syscall), number
    return out


def spins(kernels: Kernels, threads: int) -> int:
    """Turns before sleeping for this many threads on this machine: a turn takes 1 to 70 ns, which is measured here."""
    spin, idle, turns, taken = kernels.function("spin"), allocate(abi.CTX_BYTES), 500, []
    for _ in range(3):
        began = time.perf_counter_ns()
        spin(turns, idle.ctypes.data, 0, 1)
        taken.append(time.perf_counter_ns() - began)
    return (SPIN_NS if threads <= usable_cores() else CROWDED_NS) * turns // max(1, min(taken))


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class Pool:
    """Long-lived threads and the ctx block that they watch. Programs take turns on it, each with a head of its own.

    Thread 0 is the helper, which runs for a caller that has to stay in Python; see kernels/ops/forward.py.

    Parameters
    ----------
    kernels : Kernels
    threads : int
    start : bool
        False: no threads, for forward passes in Python (EDGEINFER_CHECK=1).

    Attributes
    ----------
    turn : RLock
        Held while a forward pass is prepared and run.
    words : int64 array
        ctx.
    ctx : int
        Its address.

    Raises
    ------
    EdgeInferError
        If the system refuses the threads.
    """

    def __init__(self, kernels: Kernels, threads: int, start: bool = True):
        self.kernels, self.threads = kernels, threads
        self.turn = threading.RLock()
        self.words = allocate(abi.CTX_BYTES).view(np.int64)
        self.ctx = self.words.ctypes.data
        self.submit, self.wait = kernels.function("submit"), kernels.function("wait")
        self.workers: list[threading.Thread] = []
        self._loaded: NDArray[np.int64] | None = None
        self._users = 0
        host = host_functions()
        self.words[abi.CTX_NAP_TIME // 8 + 1], self.words[abi.CTX_EVENT_TIME // 8 + 1] = NAP_NS, EVENT_NS
        nap = 1 if sys.platform == "win32" else self.ctx + abi.CTX_NAP_TIME  # a millisecond, or a timespec
        turns = spins(kernels, threads)
        for offset, value in ((abi.CTX_HOST_FUTEX, host["futex"]), (abi.CTX_FUTEX_NUMBER, host["futex_number"]),
                              (abi.CTX_HOST_YIELD, host["yield"]), (abi.CTX_HOST_CLOCK, host["clock"]),
                              (abi.CTX_CLOCK_ID, host["clock_id"]), (abi.CTX_HOST_SLEEP, host["sleep"]),
                              (abi.CTX_NAP, nap), (abi.CTX_SPINS, turns), (abi.CTX_TURNS, turns),
                              (abi.CTX_RETRY, RETRY)):
            self.words[offset >> 3] = value
        # Threads look at ctx and run in the kernels' code as long as they live, so both stay until they have ended:
        # when the last program leaves, when the pool is forgotten, and when Python exits.
        self._end = weakref.finalize(self, _end_threads, os.getpid(), self.words, self.submit, self.wait, self.workers,
                                     kernels)
        if start:
            self._start()

    def _start(self) -> None:
        worker = self.kernels.function("worker")
        try:
            for tid in range(self.threads):
                thread = threading.Thread(target=worker, args=(0, self.ctx, tid, self.threads), daemon=True,
                                          name=f"edgeinfer-{tid}")
                thread.start()
                self.workers.append(thread)
        except RuntimeError as error:
            self._end()
            raise EdgeInferError(f"The system refuses {self.threads} threads ({error}); lower --threads.") from None

    def join(self) -> NDArray[np.int64]:
        """Return the head of one more program: the words of ctx that it and its next forward pass need."""
        with self.turn:
            if not self._end.alive:
                raise ClosedError("The model whose threads are to be shared was closed; open it again.")
            self._users += 1
            return np.zeros(_HEAD, np.int64)

    def load(self, head: NDArray[np.int64]) -> None:
        """Make ctx that of the program which is to run next; by the holder of the turn, between forward passes."""
        if self._loaded is head:
            return
        if self._loaded is not None:
            self._loaded[:] = self.words[:_HEAD]
        self._loaded = None  # an interruption may come between any two of these lines
        self.words[:_HEAD] = head
        self._loaded = head

    def live(self, head: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the array that currently holds the words of a head."""
        return self.words if self._loaded is head else head

    def leave(self, head: NDArray[np.int64]) -> None:
        """Give a head up once its forward pass is over; the last one ends the threads."""
        with self.turn:
            if self._loaded is head:  # a pass of it runs only if a signal handler in the middle of it called this
                self.words[_CANCEL] = 1
                self.wait(0, self.ctx, 0, 0)
                self._loaded = None
            self._users -= 1
            if not self._users:
                self._end()


def _end_threads(
    process: int,
    words: NDArray[np.int64],
    submit: Entry,
    wait: Entry,
    workers: list[threading.Thread],
    kernels: Kernels,
) -> None:
    """End a forward pass that still runs, then the threads. `kernels` is here to be kept alive until then."""
    if process != os.getpid():  # forked: the threads are not here
        return
    ctx = words.ctypes.data
    words[_CANCEL] = words[_STOP] = 1  # from here on no forward pass begins
    wait(0, ctx, 0, 0)
    submit(0, ctx, 0, 0)
    for thread in workers:
        thread.join()
