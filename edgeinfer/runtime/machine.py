"""What this machine can do, as curves: memory by threads and by the size of scattered pieces, products by threads."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np

from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.kernels import Kernels, choose

from .executor import Executor
from .memory import allocate
from .probe import CHUNK_BYTES, OPERATIONS
from .program import Program, Record

LINE = 64
CHUNK_SIZES = tuple(LINE << shift for shift in range(15))
"""Sizes of scattered pieces: 64 bytes to 1 MiB."""
MOST_THREADS = 256
LEAST_READ_BYTES = 16 << 20
LIST_BYTES = 128 << 20
"""Scattered bytes that one pass reads."""
AHEAD_BYTES = 4096
"""How far the kernel prefetches along the list: 64 lines were enough for every size, 16 too few for small ones."""
TAKEN_BYTES = 64 << 10
"""Scattered bytes that a thread takes at a time."""
F32_OPERATIONS = {"avx512vnni": 12 * 32}
"""Multiplications and additions of a round of the f32 loop; 6 vectors of 16 elsewhere (kernels/probe.py, CHAINS)."""
LOOP_SECONDS, TRIAL_ROUNDS = 0.02, 20_000
LEAST_PASSES = 3


class MachineProbe:
    """Measures memory and arithmetic with edgeinfer's own kernels and threads. A context manager.

    Parameters
    ----------
    read_bytes : int
        Memory to read, resident as long as the probe is open; rounded down to MiB. It must be many times the caches.
    seconds : float
        Wanted duration of each measurement; at least 3 passes are made.
    progress : callable, optional
        Called with (done, total, name) while kernels compile on the first run.

    Raises
    ------
    BudgetError
        The memory is too little to leave the caches.
    UsageError
        If EDGEINFER_CHECK=1 asks for the slow walk, which measures nothing.
    """

    def __init__(self, read_bytes: int, seconds: float = 0.15,
                 progress: Callable[[int, int, str], None] | None = None):
        if os.environ.get("EDGEINFER_CHECK") == "1":
            raise UsageError("EDGEINFER_CHECK=1 compares every record in Python, which nobody can time; unset it.")
        if read_bytes < LEAST_READ_BYTES:
            raise BudgetError(f"A probe that reads {read_bytes / 1e6:.0f} MB would measure the caches; it needs "
                              f"at least {LEAST_READ_BYTES / 1e6:.0f} MB. Close other programs.")
        self.seconds, self.chunks = seconds, read_bytes // CHUNK_BYTES
        self.read_bytes = self.chunks * CHUNK_BYTES
        self._kernels = Kernels(choose(), progress)
        self.isa = self._kernels.isa.name
        self._memory = allocate(self.read_bytes)
        self._scratch = allocate(1024 * MOST_THREADS)
        self._numbers = np.random.default_rng(0)
        self._rounds: dict[str, int] = {}

    def read_gbs(self, threads: int) -> float:
        """Median bandwidth of reading all the memory in order, in GB/s."""
        with self._reader(threads) as executor:
            _timed(executor)
            return self.read_bytes / statistics.median(_repeated(lambda: _timed(executor), self.seconds)) / 1e9

    def random_share(self, size: int, threads: int) -> tuple[float, float]:
        """Bandwidth of scattered pieces of `size` bytes (a multiple of 64), as a share of reading in order.

        Passes alternate with passes in order, because on shared machines the bandwidth moves within seconds. Every pass
        has a new list, so that no cache knows its pieces.

        Returns
        -------
        share : float
            Median of the passes.
        gbs : float
            Median GB/s of the scattered passes.
        """
        pieces = min(LIST_BYTES, self.read_bytes) // size
        batch = max(1, min(TAKEN_BYTES // size, pieces // (4 * threads)))
        batches = max(1, pieces // batch)
        ahead, nbytes = max(1, AHEAD_BYTES // size), size * batch * batches
        names = allocate(4 * (batch * batches + ahead))
        parameters = (size, batch, batches, ahead, min(size, AHEAD_BYTES))
        record = Record("random_read", "scattered", (("weights", 0), ("constants", 0), ("scratch", 0)), parameters)
        shares: list[float] = []
        speeds: list[float] = []
        with self._executor(record, threads, constants=names) as executor, self._reader(threads) as reader:
            ended = time.perf_counter() + self.seconds
            while len(shares) < LEAST_PASSES or time.perf_counter() < ended:
                slots = self._numbers.integers(0, self.read_bytes // size, batch * batches + ahead, np.int32)
                names[:] = slots.view(np.uint8)
                before = _timed(reader)
                speeds.append(nbytes / _timed(executor) / 1e9)
                in_order = 2 * self.read_bytes / (before + _timed(reader)) / 1e9
                shares.append(speeds[-1] / in_order)
        return statistics.median(shares), statistics.median(speeds)

    def small_pages(self) -> None:
        """Go on with memory on small pages, to see what huge ones are worth."""
        self._memory = allocate(0)  # given back first: both together may be more than there is
        self._memory = allocate(self.read_bytes, huge=False)

    def int8_gops(self, threads: int, seconds: float | None = None) -> float:
        """Most int8 multiplications and additions of all threads together, from registers, in 1e9/s."""
        return self._operations("int8_peak", OPERATIONS, threads, seconds)

    def f32_gflops(self, threads: int) -> float:
        """Most f32 multiplications and additions of all threads together, from registers, in 1e9/s."""
        head = np.array([0.5, 1.0, 1.0], np.float32)
        self._memory[: 12] = head.view(np.uint8)
        self._memory[LINE : LINE + 12 * LINE] = np.arange(192, dtype=np.float32).view(np.uint8)
        return self._operations("f32_peak", F32_OPERATIONS.get(self.isa, 6 * 32), threads, None)

    def close(self) -> None:
        """Give the memory back."""
        self._memory = self._scratch = allocate(0)

    def __enter__(self) -> MachineProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _executor(self, record: Record, threads: int, **regions: np.ndarray) -> Executor:
        memory = {"weights": self._memory, "scratch": self._scratch, **regions}
        return Executor(Program((record,)), self._kernels, threads, memory)

    def _reader(self, threads: int) -> Executor:
        record = Record("stream_read", "read", (("weights", 0), ("scratch", 0)), (CHUNK_BYTES, self.chunks))
        return self._executor(record, threads)

    def _operations(self, kernel: str, operations: int, threads: int, seconds: float | None) -> float:
        """Operations a second of a register loop, whose rounds are chosen so that it can be timed."""
        places = (("weights", 0), ("scratch", 0))
        if kernel not in self._rounds:
            with self._executor(Record(kernel, kernel, places, (TRIAL_ROUNDS,)), 1) as trial:
                _timed(trial)
                rounds = int(TRIAL_ROUNDS * LOOP_SECONDS / _timed(trial))
            self._rounds[kernel] = max(1000, min(1 << 30, rounds))
        rounds = self._rounds[kernel]
        with self._executor(Record(kernel, kernel, places, (rounds,)), threads) as loop:
            _timed(loop)
            wanted = self.seconds if seconds is None else seconds
            return threads * rounds * operations / min(_repeated(lambda: _timed(loop), wanted)) / 1e9


def thread_counts(threads: int) -> list[int]:
    """Numbers of threads to measure: powers of two, and all."""
    return sorted({1 << shift for shift in range(int(math.log2(threads)) + 1)} | {threads})


def _repeated(measure: Callable[[], float], seconds: float) -> list[float]:
    """A measurement that is repeated for some time, at least 3 times."""
    values: list[float] = []
    ended = time.perf_counter() + seconds
    while len(values) < LEAST_PASSES or time.perf_counter() < ended:
        values.append(measure())
    return values


def _timed(executor: Executor) -> float:
    began = time.perf_counter()
    executor.run()
    return time.perf_counter() - began
