"""The executor: one linked program, its memory and its part of ctx, run by a pool of threads without the GIL.

The inner half is kernels/ops/forward.py, which also says why the threads cannot lose each other. Nothing is allocated
while a forward pass runs: this class takes part in it or, where it will last, waits for it in Python's reach.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.base.process import check_process
from edgeinfer.errors import CancelledError, ClosedError, EdgeInferError, KernelError, UsageError
from edgeinfer.kernels import Kernels, abi
from edgeinfer.runner import Cancellation

from ..program.program import Program
from .thread_tuner import ThreadTuner
from .threads import Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..weights.readers import Readers

WAIT_SECONDS = 0.02
"""Longest wait before Python looks at signals and cancellations again (a signal ends the wait at once)."""
_TOKENS = abi.CTX_COUNTS // 8 + abi.COUNT_TOKENS
MIN_EVENTS = 16
_CANCEL, _ERROR, _STOP = abi.CTX_CANCEL >> 3, abi.CTX_ERROR >> 3, abi.CTX_STOP >> 3
_STEPS = abi.CTX_STEPS >> 3


class Executor:
    """Runs a program on a pool of threads: one of its own, or that of another executor, with which it takes turns.

    Parameters
    ----------
    program : Program
        Linked by this constructor.
    kernels : Kernels
    threads : int
    regions : dict of str to uint8 array
        Memory of each region, by the names of abi.REGIONS.
    pool : Pool, optional
        Of another executor with the same number of threads. It lives until the last of them is closed.
    tuner : ThreadTuner, optional
        Chooses how many of the threads run; by default all of them.

    Attributes
    ----------
    joins : bool
        Whether the caller may be one of the threads: not if an instruction may have to wait for its completion event.
    events : int64 array
        Completion events of instructions: 0 = pending, positive = the data is there, negative = it will not come.
    steps_left : int
        Steps of those that the last forward pass might have run; ctx may be another program's by now.
    stream : Readers or None
        Reads weights from storage and sets these completion events.

    Raises
    ------
    EdgeInferError
        If the system refuses the threads.
    """

    def __init__(self, program: Program, kernels: Kernels, threads: int, regions: dict[str, NDArray[np.uint8]],
                 pool: Pool | None = None, tuner: ThreadTuner | None = None):
        self.program, self.kernels, self.threads, self.regions = program, kernels, threads, regions
        self.check = os.environ.get("EDGEINFER_CHECK") == "1"
        program.check({name: len(memory) for name, memory in regions.items()})
        program.link(kernels.addresses(program.kernels))
        self.joins = not program.words.view(np.int32)[:, abi.INST_EVENT // 4].any()
        self.tuner = tuner or ThreadTuner(threads)
        self._timespec = np.array([0, int(WAIT_SECONDS * 1e9)], np.int64)
        self._timeout = self._timespec.ctypes.data
        self._profile: NDArray[np.int64] | None = None
        self._closed = self._left = False
        self._process = os.getpid()
        self.steps_left = 0
        self.pool = pool or Pool(kernels, threads, start=not self.check)
        self._head = self.pool.join()
        for i, name in enumerate(abi.REGIONS):
            if name in regions:
                self.set(abi.CTX_REGIONS + 8 * i, regions[name].ctypes.data)
        self.set(abi.CTX_PROGRAM, program.words.ctypes.data)
        self.events = np.zeros(max(MIN_EVENTS, len(program.instructions)), np.int64)
        self.set(abi.CTX_EVENTS, self.events.ctypes.data)
        self.stream: Readers | None = None
        self.unchanged: Callable[[], None] | None = None
        """Raises `BundleError` if weights that are mapped were written to; asked after each forward pass."""

    def read_with(self, stream: Readers) -> None:
        """Add the reader of the program's weights; it is closed with the executor."""
        self.stream = stream
        self.set(abi.CTX_STREAM, stream.address)

    # -- ctx ---------------------------------------------------------------------------------------------------------

    def set(self, offset: int, value: int) -> None:
        """Write one word of ctx."""
        self._words(offset)[offset >> 3] = value

    def get(self, offset: int) -> int:
        """Read one word of ctx."""
        return int(self._words(offset)[offset >> 3])

    def set_count(self, index: int, value: int) -> None:
        """Write a dynamic count (COUNT_*)."""
        self.pool.live(self._head)[(abi.CTX_COUNTS >> 3) + index] = value

    def redeem(self, event: int, came: bool = True) -> None:
        """Let the instruction start that waits for an event, or end its pass if the data did `came` not; from any
        thread.
        """
        self.events[event] = 1 if came else -1

    @property
    def waited_ns(self) -> int:
        """Time that forward passes have waited for completion events."""
        return self.get(abi.CTX_WAITED)

    def _words(self, offset: int) -> NDArray[np.int64]:
        return self.pool.live(self._head) if offset < abi.HEAD_BYTES else self.pool.words

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, first: int = 0, stop: int | None = None, cancel: Cancellation | None = None,
            further: int = 0, meanwhile: Callable[[], None] | None = None) -> None:
        """Run the program, or its instructions first .. stop - 1, over the tokens in ctx and its tables.

        `further` more steps follow with the tokens that are sampled (abi.CTX_STEPS), until a text ends. `meanwhile` is
        called once: while the instructions run, unless the caller is one of their threads.

        Raises
        ------
        CancelledError
            If `cancel` was requested.
        ClosedError
            If the executor is closed, or was in the middle of the forward pass.
        KernelError
            If a kernel reported an error, or (EDGEINFER_CHECK=1) disagreed with its NumPy reference.
        BundleError
            If the file of the weights was written to meanwhile.
        EdgeInferError
            If data that an instruction waits for did not come.
        """
        check_process(self._process)
        with self.pool.turn:
            if not self.ended(cancel):
                words, stop = self.pool.words, len(self.program.instructions) if stop is None else stop
                self.pool.load(self._head)
                words[abi.CTX_BEGIN >> 3], words[abi.CTX_END >> 3] = first, stop
                words[_CANCEL] = words[_ERROR] = 0
                words[_STEPS] = further
                if self.stream:
                    self.stream.begin(first, stop, lambda: self.ended(cancel))
                if self.ended(cancel):
                    words[_CANCEL] = 1
                elif self.check:
                    from .check import run_checked

                    if meanwhile:
                        meanwhile()
                    run_checked(self, first, stop, cancel)
                else:
                    self._forward(first, stop, cancel, further, meanwhile)
                self._raise(int(words[_ERROR]), bool(words[_CANCEL] or words[_STOP]))
                if self.unchanged and not self._closed:
                    self.unchanged()
            elif not self._closed:
                raise CancelledError("The run was cancelled.")
        if self._closed:
            raise ClosedError("The model was closed; open it again.")

    def ended(self, cancel: Cancellation | None) -> bool:
        """Return whether a forward pass is to end, by its request or because the executor is closed."""
        return self._closed or (cancel is not None and cancel.asked)

    def _raise(self, status: int, cancelled: bool) -> None:
        if self._closed:
            return
        if cancelled or status == abi.ABANDONED:
            raise CancelledError("The run was cancelled.")
        if self.stream:
            self.stream.check(status <= abi.EVENT_FAILED)
        if status <= abi.EVENT_FAILED:
            i = abi.EVENT_FAILED - status
            instruction = self.program.instructions[i]
            raise EdgeInferError(f"Data that instruction {i} ({instruction.kernel}, {instruction.label}) needs could "
                                 "not be read.")
        if status:
            raise KernelError(f"A kernel failed with status {status}.")

    def _forward(self, first: int, stop: int, cancel: Cancellation | None, further: int,
                 meanwhile: Callable[[], None] | None) -> None:
        words, wait, ctx, timeout = self.pool.words, self.pool.wait, self.pool.ctx, self._timeout
        tokens = int(words[_TOKENS])
        threads, inside = self.tuner.plan(tokens, first, stop, 1 + further)
        inside = inside and self.joins
        if inside and meanwhile:
            meanwhile()
        began = time.perf_counter_ns()
        try:
            over = self.pool.submit(inside, ctx, 0, threads)
            if meanwhile and not inside:
                meanwhile()
            while not over:
                over = wait(timeout, ctx, 0, 0)  # back in Python: signal handlers run here
                if self.ended(cancel):
                    words[_CANCEL] = 1
        except BaseException:
            words[_CANCEL] = 1  # no call into Python before the threads are done: a second Ctrl-C could be raised there
            wait(0, ctx, 0, 0)
            raise
        if self.ended(cancel):
            words[_CANCEL] = 1
        elif not words[_ERROR]:
            self.steps_left = int(words[_STEPS])
            steps = 1 + further - self.steps_left
            self.tuner.took((time.perf_counter_ns() - began) / steps, tokens, first, stop)

    # -- profile -----------------------------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Add up the time of each instruction from now on.

        Raises
        ------
        UsageError
            This system has no clock that kernels can read.
        """
        self.check_clock()
        self._profile = np.zeros(len(self.program.instructions), np.int64)
        self.set(abi.CTX_PROFILE, self._profile.ctypes.data)

    def check_clock(self) -> None:
        """Raise `UsageError` if the time of instructions cannot be measured."""
        if not self.get(abi.CTX_HOST_CLOCK):
            raise UsageError(f"Kernels can read no clock on this system ({sys.platform}), so instructions cannot be "
                             "timed; "
                             "leave --profile out.")

    def stop_profile(self) -> NDArray[np.int64]:
        """Nanoseconds of each instruction since `start_profile`, of shape (n_records,)."""
        self.set(abi.CTX_PROFILE, 0)
        profile, self._profile = self._profile, None
        return np.zeros(0, np.int64) if profile is None else profile

    # -- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel a pass that another thread has running and leave the pool, whose threads end with its last program."""
        self._closed = True
        if self._process != os.getpid():  # forked: neither the threads nor the holder of their lock exist here
            return
        with self.pool.turn:
            if not self._left:
                self._left = True
                if self.stream:
                    self.stream.close()
                self.pool.leave(self._head)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
