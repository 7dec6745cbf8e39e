"""The executor: long-lived threads that walk the program without the GIL, and the main thread that waits in Python.

The inner half is kernels/walk.py, which also says why the threads cannot lose each other. Nothing is allocated while a
walk runs: this class starts it and waits.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CancelledError, ClosedError, EdgeInferError, KernelError
from edgeinfer.kernels import Kernels, abi

from .memory import allocate
from .program import Program
from .threads import host_functions, spins

WAIT_SECONDS = 0.05
"""Longest wait before Python looks at signals again (a signal ends the wait at once)."""
_CANCEL, _ERROR, _STOP = abi.CTX_CANCEL >> 3, abi.CTX_ERROR >> 3, abi.CTX_STOP >> 3
Entry = Callable[[int, int, int, int], int]
"""A kernel as Python calls it: record, ctx, thread, threads."""


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

    Raises
    ------
    EdgeInferError
        If the system refuses the threads.
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
        self._timespec = np.array([0, int(WAIT_SECONDS * 1e9)], np.int64)
        self._timeout = self._timespec.ctypes.data
        self._profile: NDArray[np.int64] | None = None
        self._closed = False
        self._process = os.getpid()
        self._write_ctx()
        self._workers: list[threading.Thread] = []
        # Threads look at ctx and run in the kernels' code as long as they live, so both stay until they have ended: on
        # close, when the executor is forgotten, and when Python exits.
        self._end = weakref.finalize(
            self, _end_threads, self._process, self._words, self._submit, self._wait, self._workers, kernels
        )
        if not self.check:
            self._start()

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
        if self._process != os.getpid():
            raise EdgeInferError("This process was forked from the one that opened the model, and threads are not "
                                 "inherited; open the model again in this process.")
        if self.check:
            from .check import run_checked

            run_checked(self)
        else:
            self._walk()
        status = self.get(abi.CTX_ERROR)
        self.set(abi.CTX_ERROR, 0)
        if self.get(abi.CTX_CANCEL) or status == abi.ABANDONED:
            self.set(abi.CTX_CANCEL, 0)
            raise CancelledError("The run was cancelled.")
        if status:
            raise KernelError(f"A kernel failed with status {status}.")

    def _walk(self) -> None:
        words, submit, wait, ctx, timeout = self._words, self._submit, self._wait, self.ctx, self._timeout
        try:
            submit(0, ctx, 0, 0)
            while not wait(timeout, ctx, 0, 0):
                pass  # back in Python: signal handlers run here
        except BaseException:
            words[_CANCEL] = 1  # no call into Python before the threads are done: a second Ctrl-C could be raised there
            try:
                wait(0, ctx, 0, 0)
            finally:
                words[_CANCEL] = words[_ERROR] = 0
            raise

    def cancel(self) -> None:
        """End the walk at the next chunk of work; callable from any thread and from signal handlers."""
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

    def _start(self) -> None:
        worker = self.kernels.function("worker")
        epoch = self.get(abi.CTX_EPOCH)
        try:
            for tid in range(self.threads):
                thread = threading.Thread(target=worker, args=(epoch, self.ctx, tid, self.threads), daemon=True,
                                          name=f"edgeinfer-{tid}")
                thread.start()
                self._workers.append(thread)
        except RuntimeError as error:
            self.close()
            raise EdgeInferError(f"The system refuses {self.threads} threads ({error}); lower --threads.") from None

    def close(self) -> None:
        """Stop the threads; a walk that another thread has running is cancelled."""
        self._closed = True
        self._end()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end_threads(
    process: int,
    words: NDArray[np.int64],
    submit: Entry,
    wait: Entry,
    workers: list[threading.Thread],
    kernels: Kernels,
) -> None:
    """End a walk that still runs, then the threads. `kernels` is here to be kept alive until then."""
    if process != os.getpid():  # forked: the threads are not here
        return
    ctx = words.ctypes.data
    words[_CANCEL] = 1
    wait(0, ctx, 0, 0)
    words[_STOP] = 1
    submit(0, ctx, 0, 0)
    for thread in workers:
        thread.join()
