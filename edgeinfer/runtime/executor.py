"""The executor: long-lived threads that walk the program without the GIL, and the main thread that waits in Python.

The inner half is kernels/walk.py. Nothing is allocated while a walk runs: this class writes tables, starts the walk, waits.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CancelledError, ClosedError, KernelError
from edgeinfer.kernels import Kernels, abi

from .memory import allocate
from .program import Program
from .threads import host_functions, spins

WAIT_SECONDS = 0.05
"""Longest wait before Python looks at signals again (a signal ends the wait at once)."""


class Executor:
    """Runs a linked program over a ctx block.

    Parameters
    ----------
    program : Program
        Linked by this constructor.
    kernels : Kernels
    threads : int
    regions : dict of str to uint8 array
        Memory of each region, by the names of abi.REGIONS.
    """

    def __init__(self, program: Program, kernels: Kernels, threads: int, regions: dict[str, NDArray[np.uint8]]):
        self.program, self.kernels, self.threads = program, kernels, threads
        self.regions = regions
        self.check = os.environ.get("EDGEINFER_CHECK") == "1"
        program.link(kernels.addresses(program.kernels))
        self._memory = allocate(abi.CTX_BYTES)
        self.ctx = self._memory.ctypes.data
        self._words = self._memory.view(np.int64)
        self._submit, self._wait = kernels.function("submit"), kernels.function("wait")
        self._timeout = np.array([0, int(WAIT_SECONDS * 1e9)], np.int64)
        self._profile: NDArray[np.int64] | None = None
        self._closed = False
        self._write_ctx()
        self._workers = [] if self.check else self._start()

    # -- ctx ---------------------------------------------------------------------------------------------------------

    def set(self, offset: int, value: int) -> None:
        """Write one word of ctx."""
        self._words[offset >> 3] = value

    def get(self, offset: int) -> int:
        """Read one word of ctx."""
        return int(self._words[offset >> 3])

    def set_count(self, index: int, value: int) -> None:
        """Write a dynamic count (COUNT_*)."""
        self._words[(abi.CTX_COUNTS >> 3) + index] = value

    def _write_ctx(self) -> None:
        for i, name in enumerate(abi.REGIONS):
            if name in self.regions:
                self.set(abi.CTX_REGIONS + 8 * i, self.regions[name].ctypes.data)
        host = host_functions()
        self.set(abi.CTX_PROGRAM, self.program.words.ctypes.data)
        self.set(abi.CTX_N_RECORDS, len(self.program.records))
        self.set(abi.CTX_HOST_FUTEX, host["futex"])
        self.set(abi.CTX_FUTEX_NUMBER, host["futex_number"])
        self.set(abi.CTX_HOST_YIELD, host["yield"])
        self.set(abi.CTX_HOST_CLOCK, host["clock"])
        self.set(abi.CTX_SPINS, spins(self.threads))

    # -- walking -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walk the program once over what ctx and its tables describe.

        Raises
        ------
        CancelledError
            If `cancel` was called.
        KernelError
            If a kernel reported an error, or (EDGEINFER_CHECK=1) disagreed with its NumPy twin.
        """
        if self._closed:
            raise ClosedError("The model was closed; open it again.")
        if self.check:
            from .check import run_checked

            run_checked(self)
        else:
            self._walk()
        if self.get(abi.CTX_CANCEL):
            self.set(abi.CTX_CANCEL, 0)
            raise CancelledError("The run was cancelled.")
        if status := self.get(abi.CTX_ERROR):
            self.set(abi.CTX_ERROR, 0)
            raise KernelError(f"A kernel failed with status {status}.")

    def _walk(self) -> None:
        epoch = self._submit(0, self.ctx, 0, 0)
        try:
            while not self._wait(self._timeout.ctypes.data, self.ctx, epoch, 0):
                pass  # back in Python: signal handlers run here
        except BaseException:
            self.cancel()
            while not self._wait(self._timeout.ctypes.data, self.ctx, epoch, 0):
                pass
            self.set(abi.CTX_CANCEL, 0)
            raise

    def cancel(self) -> None:
        """End the walk at the next barrier; callable from any thread and from signal handlers."""
        self.set(abi.CTX_CANCEL, 1)

    def forget_cancel(self) -> None:
        """Drop a cancellation that came while nothing ran."""
        self.set(abi.CTX_CANCEL, 0)

    # -- profile -----------------------------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Add up the time of each record from now on."""
        self._profile = np.zeros(len(self.program.records), np.int64)
        self.set(abi.CTX_PROFILE, self._profile.ctypes.data if self.get(abi.CTX_HOST_CLOCK) else 0)

    def stop_profile(self) -> NDArray[np.int64]:
        """Nanoseconds of each record since `start_profile`, of shape (n_records,)."""
        self.set(abi.CTX_PROFILE, 0)
        profile, self._profile = self._profile, None
        return np.zeros(0, np.int64) if profile is None else profile

    # -- threads -----------------------------------------------------------------------------------------------------

    def _start(self) -> list[threading.Thread]:
        worker = self.kernels.function("worker")
        epoch = self.get(abi.CTX_EPOCH)
        workers = [threading.Thread(target=worker, args=(epoch, self.ctx, tid, self.threads), daemon=True,
                                    name=f"edgeinfer-{tid}") for tid in range(self.threads)]
        for thread in workers:
            thread.start()
        return workers

    def close(self) -> None:
        """Stop the threads. The caller must not be in `run`."""
        if self._closed:
            return
        self._closed = True
        if self._workers:
            self.set(abi.CTX_STOP, 1)
            self._submit(0, self.ctx, 0, 0)
            for thread in self._workers:
                thread.join()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
