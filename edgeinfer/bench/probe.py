"""Present limits of this machine: memory read in order and scattered, and products from registers.

These limits belong beside every measurement, taken in the same minutes: on shared machines they change by a factor.
Every method is therefore one short reading; `repeated` combines several.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.base.progress import OnStageProgress

from ..errors import UsageError
from ..kernels import Kernels, choose
from ..runtime import Executor, Instruction, Program, allocate

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES = 1 << 20
LINE = 64
CHUNK_SIZES = tuple(LINE << shift for shift in range(15))
"""Sizes of scattered pieces: 64 bytes to 1 MiB."""
LIST_BYTES = 128 << 20
"""Scattered bytes that one pass reads."""
AHEAD_BYTES = 4096
"""Prefetch distance along the list: 64 lines were enough for every size, 16 too few for small ones."""
TAKEN_BYTES = 64 << 10
"""Scattered bytes that a thread takes at a time."""
RESULT_BYTES = 1024
"""Bytes that a thread writes, so that the compiler removes nothing."""
LOOP_SECONDS, TRIAL_ROUNDS = 0.02, 1000
"""Wanted duration of a register loop, and rounds to find out how many that takes."""
MIN_READINGS = 3


class MachineProbe:
    """Measures the machine with the kernels and the kind of threads that a session uses. A context manager.

    Parameters
    ----------
    threads : int
        The most that a reading uses, and those of a reading that names no number.
    read_bytes : int
        Memory to read, resident as long as the probe is open; rounded down to MiB.
    progress : callable, optional
        Called with (done, total, name) while kernels compile on the first run.

    Raises
    ------
    UsageError
        If EDGEINFER_CHECK=1 asks for the slow forward pass, which measures nothing.
    """

    def __init__(self, threads: int, read_bytes: int, progress: OnStageProgress | None = None):
        if os.environ.get("EDGEINFER_CHECK") == "1":
            raise UsageError("EDGEINFER_CHECK=1 compares every instruction in Python, so timings mean nothing; unset "
                             "it.")
        self.threads, self._chunks = threads, max(1, read_bytes // CHUNK_BYTES)
        self.read_bytes = self._chunks * CHUNK_BYTES
        self._kernels = Kernels(choose(), progress)
        self.isa = self._kernels.isa.name
        self._regions: dict[str, NDArray[np.uint8]] = {"scratch": allocate(RESULT_BYTES * threads)}
        self._executors: dict[str, Executor] = {}  # by kernel; all with the threads of the last reading
        self._rounds: dict[str, int] = {}
        self._numbers = np.random.default_rng(0)
        self._take_memory(huge=True)
        self.read_gbs()  # the first pass pays for the threads' start

    # -- readings ----------------------------------------------------------------------------------------------------

    def read_gbs(self, threads: int | None = None) -> float:
        """Return the bandwidth of one pass over the memory in order, in GB/s."""
        return self.read_bytes / self._seconds(self._executor("stream_read", threads, CHUNK_BYTES, self._chunks)) / 1e9

    def int8_gops(self, threads: int | None = None) -> float:
        """Return int8 multiplications and additions of all threads together, from registers, in 1e9/s."""
        return self._operations("int8_peak", threads)

    def f32_gflops(self, threads: int | None = None) -> float:
        """Return f32 multiplications and additions of all threads together, from registers, in 1e9/s."""
        return self._operations("f32_peak", threads)

    def random_share(self, size: int, seconds: float, threads: int | None = None) -> float:
        """Return the bandwidth of scattered pieces, as a share of reading in order: a median over `seconds`.

        `size` is in bytes, a multiple of 64. Both alternate, because on shared machines the bandwidth moves
        within seconds.
        """
        scattered = self._scattered(size, threads or self.threads)

        def share() -> float:
            before, found, after = self.read_gbs(threads), scattered(), self.read_gbs(threads)
            return found / 2 * (1 / before + 1 / after)

        return statistics.median(repeated(share, seconds))

    # -- memory and threads ------------------------------------------------------------------------------------------

    def small_pages(self) -> None:
        """Continue with memory on small pages, to measure the effect of huge ones."""
        self._take_memory(huge=False)

    def close(self) -> None:
        """Stop the threads and give the memory back."""
        self._forget(*self._executors)
        self._regions.clear()

    def __enter__(self) -> MachineProbe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take_memory(self, huge: bool) -> None:
        self._forget(*self._executors)
        self._regions.pop("weights", None)  # freed first: both together may not fit
        self._regions["weights"] = memory = allocate(self.read_bytes, huge=huge)
        memory[:12] = np.array([0.5, 1.0, 1.0], np.float32).view(np.uint8)  # operands of f32_peak
        memory[LINE : 13 * LINE] = np.arange(192, dtype=np.float32).view(np.uint8)

    def _scattered(self, size: int, threads: int) -> Callable[[], float]:
        """Return a reading, in GB/s. Every call has a new list, so that no cache knows its pieces."""
        pieces = min(LIST_BYTES, self.read_bytes) // size
        batch = max(1, min(TAKEN_BYTES // size, pieces // (4 * threads)))
        batches = max(1, pieces // batch)
        ahead = max(1, AHEAD_BYTES // size)
        self._regions["constants"] = names = allocate(4 * (batch * batches + ahead))
        self._forget("random_read")
        parameters = (size, batch, batches, ahead, min(size, AHEAD_BYTES))

        def reading() -> float:
            executor = self._executor("random_read", threads, *parameters)
            slots = self._numbers.integers(0, self.read_bytes // size, batch * batches + ahead, np.int32)
            names[:] = slots.view(np.uint8)
            return size * batch * batches / self._seconds(executor) / 1e9

        return reading

    def _executor(self, kernel: str, threads: int | None, *parameters: int) -> Executor:
        """Return an executor of one instruction, which is kept as long as readings are of the same number of threads.
        """
        threads = threads or self.threads
        if any(executor.threads != threads for executor in self._executors.values()):
            self._forget(*self._executors)
        if kernel not in self._executors:
            self._executors[kernel] = self._new_executor(kernel, threads, *parameters)
            _timed(self._executors[kernel])
        return self._executors[kernel]

    def _new_executor(self, kernel: str, threads: int, *parameters: int) -> Executor:
        regions = ["weights", *["constants"][: kernel == "random_read"], "scratch"]
        instruction = Instruction(kernel, kernel, tuple((name, 0) for name in regions), parameters)
        return Executor(Program((instruction,)), self._kernels, threads, dict(self._regions))

    def _forget(self, *kernels: str) -> None:
        for executor in [self._executors.pop(name) for name in kernels if name in self._executors]:
            executor.close()
            executor.regions.clear()

    def _operations(self, kernel: str, threads: int | None) -> float:
        """Return the speed of a register loop, in 1e9 operations/s."""
        executor = self._executor(kernel, threads, self._loop_rounds(kernel))
        operations = executor.threads * self._rounds[kernel] * self._kernels.isa.round_operations[kernel]
        return operations / self._seconds(executor) / 1e9

    def _loop_rounds(self, kernel: str) -> int:
        """Return rounds enough to be timed: instruction sets differ a hundredfold."""
        if kernel not in self._rounds:
            with self._new_executor(kernel, 1, TRIAL_ROUNDS) as trial:
                _timed(trial)
                rounds = int(TRIAL_ROUNDS * LOOP_SECONDS / _timed(trial))
            self._rounds[kernel] = max(TRIAL_ROUNDS, min(1 << 30, rounds))
        return self._rounds[kernel]

    def _seconds(self, executor: Executor) -> float:
        """Time a forward pass, after work for a moment: threads that slept may wake up on one core and part later."""
        if executor.threads > 1:
            _timed(self._executor("int8_peak", executor.threads, self._loop_rounds("int8_peak")))
        return _timed(executor)


def huge_pages_share(nbytes: int) -> float:
    """Return which share of this many bytes of this process is on huge pages; 0 if the system does not say."""
    with suppress(OSError):
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii", errors="replace")
        if match := re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE):
            return min(int(match[1]) * 1024 / nbytes, 1.0)
    return 0.0


def thread_counts(threads: int) -> list[int]:
    """Return the numbers of threads to measure: powers of two, and all."""
    return sorted({1 << shift for shift in range(int(math.log2(threads)) + 1)} | {threads})


def repeated(reading: Callable[[], float], seconds: float) -> list[float]:
    """Return a reading that is repeated for some time, at least 3 times."""
    values: list[float] = []
    ended = time.perf_counter() + seconds
    while len(values) < MIN_READINGS or time.perf_counter() < ended:
        values.append(reading())
    return values


def _timed(executor: Executor) -> float:
    began = time.perf_counter()
    executor.run()
    return time.perf_counter() - began
