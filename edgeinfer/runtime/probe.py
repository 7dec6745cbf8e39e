"""What this machine gives right now: bandwidth of streaming reads, and int8 products from registers.

Both limits belong beside every measurement, taken in the same minutes: on shared machines they move by a factor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType

from edgeinfer.errors import UsageError
from edgeinfer.kernels import Kernels, choose

from .executor import Executor
from .memory import allocate
from .program import Program, Record

CHUNK_BYTES = 1 << 20
OPERATIONS = 16 * 64 * 2
"""Multiplications and additions of a round of the register loop: 16 products of 64 values."""
LOOP_SECONDS = 0.02
"""Wanted duration of the register loop."""


class Probe:
    """Measures the machine with the kernels and threads that a session uses. A context manager.

    Parameters
    ----------
    threads : int
    read_bytes : int
        Memory to read, resident as long as the probe is open; rounded down to MiB.
    progress : callable, optional
        Called with (done, total, name) while kernels compile on the first run.

    Raises
    ------
    UsageError
        If EDGEINFER_CHECK=1 asks for the slow walk, which measures nothing.
    """

    def __init__(self, threads: int, read_bytes: int,
                 progress: Callable[[int, int, str], None] | None = None):
        if os.environ.get("EDGEINFER_CHECK") == "1":
            raise UsageError("EDGEINFER_CHECK=1 compares every record in Python, which nobody can time; unset it.")
        self.threads, chunks = threads, max(1, read_bytes // CHUNK_BYTES)
        self.read_bytes = chunks * CHUNK_BYTES
        self._kernels = Kernels(choose(), progress)
        self.isa = self._kernels.isa.name
        self._regions = {"weights": allocate(self.read_bytes), "scratch": allocate(64 * threads)}
        self._rounds, self._loop = self._calibrated()
        self._reader = self._executor("stream_read", CHUNK_BYTES, chunks)
        self.read_gbs()  # the first pass pays for the threads' start

    def read_gbs(self) -> float:
        """Bandwidth of one pass over the memory by all threads, in GB/s."""
        self._spread()
        return self.read_bytes / _seconds(self._reader) / 1e9

    def int8_gops(self) -> float:
        """Int8 multiplications and additions of all threads together, from registers, in 1e9/s."""
        self._spread()
        return self.threads * self._rounds * OPERATIONS / _seconds(self._loop) / 1e9

    def _spread(self) -> None:
        """Work for a moment: threads that slept may wake up on one core, and are parted only milliseconds later."""
        if self.threads > 1:
            _seconds(self._loop)

    def close(self) -> None:
        """Stop the threads and give the memory back."""
        for executor in (self._reader, self._loop):
            executor.close()
            executor.regions.clear()
        self._regions.clear()

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _executor(self, kernel: str, *parameters: int) -> Executor:
        record = Record(kernel, kernel, (("weights", 0), ("scratch", 0)), parameters)
        return Executor(Program((record,)), self._kernels, self.threads, dict(self._regions))

    def _calibrated(self) -> tuple[int, Executor]:
        """The register loop with rounds enough to be timed: instruction sets differ a hundredfold."""
        rounds = 1000
        with self._executor("int8_peak", rounds) as trial:
            _seconds(trial)
            seconds = _seconds(trial)
        rounds = max(rounds, min(1 << 30, int(rounds * LOOP_SECONDS / seconds)))
        loop = self._executor("int8_peak", rounds)
        _seconds(loop)
        return rounds, loop


def _seconds(executor: Executor) -> float:
    began = time.perf_counter()
    executor.run()
    return time.perf_counter() - began
