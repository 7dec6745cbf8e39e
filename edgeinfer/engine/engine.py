"""The engine: one thread at a time owns a runner and runs the requests of all threads together."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ..base.process import check_process
from ..errors import ClosedError, EdgeInferError, QueueFullError, RequestError
from .scheduler import Scheduler
from .step import Steps
from .token_budget import MAX_ITL

if TYPE_CHECKING:
    from ..runner import Runner
    from .pass_times import PassTimes
    from .remote_prompts import Part
    from .request import Request

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
        It belongs to the engine until `close`, and is used by one thread at a time: by the client of a request that is
        alone, else by the engine's own thread.
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
        self._inbox: deque[Request[Any]] = deque()
        self._thread: threading.Thread | None = None
        """Runs the steps; None while there is nothing to run."""
        self._own: threading.Thread | None = None
        """The engine's thread, which waits for `_bell` while it is not the one that runs the steps."""
        self._bell = threading.Lock()
        self._bell.acquire()
        self._starting = threading.RLock()
        """Protects the choice of the thread that runs the steps."""
        _open.add(self)

    # -- other threads -----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedError` once the engine is closed, and `EdgeInferError` in a process that was forked."""
        if self.closed:
            raise ClosedError(CLOSED)
        check_process(self.process)

    @property
    def inside(self) -> bool:
        """True if this is the thread that runs the steps."""
        return self._thread is threading.current_thread()

    def check_outside(self) -> None:
        """Raise `RequestError` in a callback, whose thread cannot wait for steps that it runs itself."""
        if self.inside:
            raise RequestError("A callback cannot wait for a request: it runs in the thread that runs all requests. "
                               "Make the request in another thread.")

    @property
    def n_running(self) -> int:
        """Requests that run."""
        return len(self.scheduler.running)

    @property
    def n_waiting(self) -> int:
        """Requests that wait."""
        return len(self.scheduler.waiting) + len(self._inbox)

    @property
    def preemptions(self) -> int:
        """Number of times that a request gave up its blocks for older ones."""
        return self.scheduler.preemptions

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self._steps.passes

    @property
    def pass_times(self) -> PassTimes:
        """Time of a token so far."""
        return self._steps.pass_times

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
            raise QueueFullError(f"{self.n_waiting} requests are waiting for this model, the maximum (max_queue); "
                                 "retry later.")
        request.task.arrive()
        with self._starting:
            self._inbox.append(request)
            if self._thread is None:
                self._call_own()

    def run(self, request: Request[Any]) -> None:
        """Run a request in this thread, its client's, as long as no other is there; otherwise `submit` it.

        It then needs no wake-up of another thread, which takes longer than a forward pass of a small model. An
        exception of a signal handler, such as KeyboardInterrupt, may come at any line, and ends the request.
        """
        self.check_outside()
        self.check_open()
        try:
            with self._starting:
                if self._thread is None and not self._inbox:
                    self._thread = threading.current_thread()
            if self.inside:
                request.task.arrive()
                self.scheduler.add(request)
                while not (request.ended or self.closed or self._inbox or self.scheduler.remote.waiting):
                    self._steps.run()
                return
        except BaseException:
            if self.inside:
                self._steps.abandon(request)
            raise
        finally:
            try:
                self._leave()
            finally:  # again if it was interrupted
                self._leave()
        self.submit(request)

    def receive(self, part: Part) -> None:
        """Let a part of a prompt that another process computes be written; raises `ClosedError`."""
        self.check_open()
        with self._starting:
            self.scheduler.remote.put(part)
            if self._thread is None:
                self._call_own()

    def cancel(self) -> None:
        """Cancel all requests that run, or would but for older ones; from any thread or a signal handler."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.task.preemptions or request in self.scheduler.running:
                request.cancel()

    def close(self) -> None:
        """End running requests, refuse waiting ones and close the runner. Callable twice, and from any thread."""
        if self.stop():
            self.runner.close()

    def stop(self) -> bool:
        """End running requests and refuse waiting ones; returns whether the runner is the caller's to close from then
        on."""
        self.closed = True
        if self.process != os.getpid():  # forked: the thread does not exist here
            return True
        self.cancel()
        if self.inside:  # in a callback of a request: the thread closes the runner when it has left it
            self._closes = True
            return False
        while self._thread not in (None, self._own):  # a client runs the steps, and leaves them within 100 ms
            time.sleep(0.001)
        with self._starting:
            thread = self._own
            if thread is not None and self._thread is None:
                self._call_own()
        if thread is not None:
            thread.join()
        self._refuse(ClosedError(CLOSED))
        return True

    # -- the thread that runs the steps ------------------------------------------------------------------------------

    def _call_own(self) -> None:
        """Let the engine's own thread run the steps, and start it if necessary."""
        if self._own is None:
            thread = threading.Thread(target=self._serve, name="edgeinfer engine", daemon=True)
            thread.start()
            self._own = self._thread = thread
            return
        self._thread = self._own
        if self._bell.locked():
            self._bell.release()

    def _leave(self) -> None:
        """Run no further steps in this thread, if it does; the engine's own thread continues the requests."""
        with self._starting:
            if not self.inside:
                return
            if self.closed:
                self._refuse(ClosedError(CLOSED))
            elif self._inbox or self.scheduler.remote.waiting or self.scheduler.running or self.scheduler.waiting:
                return self._call_own()
            self._thread = None
        if self._closes:
            self.runner.close()

    def _serve(self) -> None:
        """Run steps while there are requests, and end after some time without any."""
        while True:
            with self._starting:
                if not self.inside:
                    self._own = None
                    return
            self._work()
            if not self.closed:
                self._bell.acquire(timeout=LINGER_SECONDS)

    def _work(self) -> None:
        """Run steps as long as there are requests."""
        try:
            while not self.closed:
                while self._inbox:
                    self.scheduler.add(self._inbox.popleft())
                self.scheduler.remote.write()
                if self.scheduler.running or self.scheduler.waiting:
                    self._steps.run()
                elif not self.scheduler.remote.waiting:
                    break
        except BaseException as error:  # of the engine itself: no request may wait for ever
            failure = EdgeInferError(f"The engine failed ({type(error).__name__}: {error}); this is a bug.")
            failure.__cause__ = error
            self._refuse(failure, failed=True)
        finally:
            self._leave()

    def _refuse(self, error: Exception, failed: bool = False) -> None:
        """End all requests there are, and those that came too late."""
        while self._inbox:
            request = self._inbox.popleft()
            if request.claim():
                request.task.end()
                request.conclude(error)
        self._steps.close(error, failed)
        self.scheduler.remote.close()


@atexit.register
def _close_all() -> None:
    """End forward passes before the interpreter gives up the memory that they use."""
    for engine in tuple(_open):
        if engine.process == os.getpid():
            engine.close()
