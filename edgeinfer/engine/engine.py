"""The engine: one thread that owns a runner and runs the requests of all other threads together."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ..base.process import check_process
from ..errors import ClosedError, EdgeInferError, QueueFullError
from .scheduler import Scheduler
from .step import Steps

if TYPE_CHECKING:
    from ..runner import Runner
    from .request import Request

MAX_ITL = 0.2
"""Seconds between two tokens of a text that the prompts of other requests may cause."""
MAX_QUEUE = 1024
"""Requests that may wait."""
CLOSED = "The model was closed; open it again."
LINGER_SECONDS = 1.0
"""Time after the last request until the thread ends; the next request starts another one."""
_open: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs the requests of several threads at once, in one forward pass after the other.

    Parameters
    ----------
    runner : Runner
        It belongs to the engine until `close`, and is used by the engine's thread alone while requests run.
    max_itl : float
        Seconds that a step may last at most because prompts share it; a single sequence may take longer.
    max_queue : int
        Requests that may wait.

    Attributes
    ----------
    process : int
        The process that opened it; a forked child cannot use it.
    """

    def __init__(self, runner: Runner, max_itl: float = MAX_ITL, max_queue: int = MAX_QUEUE):
        self.runner, self.closed, self.process = runner, False, os.getpid()
        self.scheduler = Scheduler(runner, max_itl)
        self._steps = Steps(self.scheduler, lambda: self.closed)
        self._most_waiting, self._closes = max_queue, False
        self._inbox: SimpleQueue[Request[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        _open.add(self)

    # -- other threads -----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedError` once the engine is closed, and `EdgeInferError` in a process that was forked."""
        if self.closed:
            raise ClosedError(CLOSED)
        check_process(self.process)

    @property
    def inside(self) -> bool:
        """Whether this is the engine's own thread."""
        return self._thread is threading.current_thread()

    @property
    def n_running(self) -> int:
        """Requests that run."""
        return len(self.scheduler.running)

    @property
    def n_waiting(self) -> int:
        """Requests that wait."""
        return len(self.scheduler.waiting) + self._inbox.qsize()

    @property
    def preemptions(self) -> int:
        """Number of times that a request gave up its blocks for older ones."""
        return self.scheduler.preemptions

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self._steps.passes

    def submit(self, request: Request[Any]) -> None:
        """Let a request wait and run.

        Raises
        ------
        ClosedError
            The engine was closed.
        QueueFullError
            As many requests wait as may.
        """
        self.check_open()
        if self.n_waiting >= self._most_waiting:
            raise QueueFullError(f"{self.n_waiting} requests wait for this model, the most that may (max_queue); ask "
                                 "again later.")
        request.task.arrive()
        with self._starting:
            self._inbox.put(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="edgeinfer engine", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Let the engine look at cancellations; from any thread, signal handlers and finalizers."""
        self._inbox.put(None)

    def cancel(self) -> None:
        """Cancel all requests that run, or would but for older ones; from any thread or a signal handler."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.task.preemptions or request in self.scheduler.running:
                request.cancel()

    def close(self) -> None:
        """End what runs, refuse what waits and close the runner. Callable twice, and from any thread."""
        if self.stop():
            self.runner.close()

    def stop(self) -> bool:
        """End what runs and refuse what waits; returns whether the runner is the caller's to close from then on."""
        self.closed = True
        if self.process != os.getpid():  # forked: the thread does not exist here
            return True
        self.cancel()
        self.wake()
        thread = self._thread
        if self.inside:  # in a callback of a request: the thread closes the runner when it has left it
            self._closes = True
            return False
        if thread is not None:
            thread.join()
        self._refuse(ClosedError(CLOSED))
        return True

    # -- its own thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self.closed and self._receive():
                self._steps.run()
        except BaseException as error:  # of the engine itself: no request may wait for ever
            failure = EdgeInferError(f"The engine failed ({type(error).__name__}: {error}); this is a bug.")
            failure.__cause__ = error
            self._refuse(failure, failed=True)
        finally:
            with self._starting:  # a request that comes before this is concluded here; a later one starts a thread
                if self.closed:
                    self._refuse(ClosedError(CLOSED))
                if self._thread is threading.current_thread():
                    self._thread = None
            if self._closes:
                self.runner.close()

    def _receive(self) -> bool:
        """Take in new requests, and wait for one if nothing is to be done; returns whether the thread continues."""
        scheduler, inbox = self.scheduler, self._inbox
        if not (scheduler.running or scheduler.waiting) and not self._wait():
            return False
        while not inbox.empty():
            try:
                request = inbox.get_nowait()
            except Empty:  # only this thread takes
                break
            if request is not None:
                scheduler.add(request)
        return True

    def _wait(self) -> bool:
        """Wait for a request or a close; returns False, and is no longer the engine's thread, if none came."""
        try:
            request = self._inbox.get(timeout=LINGER_SECONDS)
        except Empty:
            with self._starting:
                if self._inbox.empty():
                    self._thread = None
                    return False
            return True
        if request is not None:
            self.scheduler.add(request)
        return True

    def _refuse(self, error: Exception, failed: bool = False) -> None:
        """End all requests there are, and those that came too late."""
        while True:
            try:
                request = self._inbox.get_nowait()
            except Empty:
                break
            if request is not None and request.claim():
                request.task.end()
                request.conclude(error)
        self._steps.close(error, failed)


@atexit.register
def _close_all() -> None:
    """End forward passes before the interpreter gives up the memory that they use."""
    for engine in tuple(_open):
        if engine.process == os.getpid():
            engine.close()
