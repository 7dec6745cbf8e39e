"""Calls of onnxruntime that can be ended while they run, between two operations of the model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .devices import Provider

LOOK_SECONDS = 0.02
"""Interval at which a thread that waits for a call checks for cancellation."""
NO_GRAPH = -1
"""The number of a run that is neither recorded nor replayed."""


class _Call:
    """One run of a model, made once."""

    def __init__(self, session: Any, binding: Any, options: Any):
        self._run, self._binding, self.options = session.run_with_iobinding, binding, options
        self.over = False
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        """Free when it is over."""
        self.ended.acquire()

    def make(self) -> None:
        """Make the call, unless it was made."""
        if self.over:
            return
        try:
            self._run(self._binding, self.options)
        except BaseException as error:
            self.error = error
        self.over = True
        self.ended.release()


class Caller:
    """Makes the calls of a runner one after the other, in a thread of its own.

    So the waiting thread is in Python, where signal handlers run, and can end a call. On a provider with graphs calls
    are not ended: a graph that was ended while it was recorded would be replayed only partly. Calls are short there,
    and made in that thread too, because a graph belongs to the thread that recorded it.

    Each call has options of its own, for the wish to end one stays with them.
    """

    def __init__(self, provider: Provider):
        self._provider, self._endable = provider, not provider.graphs
        self._running: Any = None
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._queue.put, None)

    def run(self, session: Any, binding: Any, ended: Callable[[], bool], graph: int = NO_GRAPH) -> None:
        """Run a model over the bound arrays, and return when that is over.

        Parameters
        ----------
        session : onnxruntime.InferenceSession
        binding : onnxruntime.IOBinding
        ended : callable
            Whether the call is to end now; looked at before it runs, and without graphs while it does.
        graph : int
            Which graph to record or replay, where the provider has them.

        Raises
        ------
        Exception
            Whatever onnxruntime raises, also where a call was ended.
        """
        self._running = options = run_options(self._provider, graph)
        if ended():  # asked for before there was anything to end
            raise RuntimeError("The call was cancelled before it began.")
        self._wait(_Call(session, binding, options), ended)

    def _wait(self, call: _Call, ended: Callable[[], bool]) -> None:
        """Make a call; an exception of a signal handler is raised once nothing touches the memory any more.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="onnxruntime calls", daemon=True)
            self._thread.start()
        interrupt, queued = None, False
        while not call.over and self._thread.is_alive():  # the handler may have closed the runner
            try:
                if not queued:
                    self._queue.put(call)
                    queued = True  # where a handler raises before this it is put twice, and made once
                if not call.ended.acquire(timeout=LOOK_SECONDS) and ended():
                    self._terminate(call.options)
            except BaseException as error:
                interrupt = error
                if self._endable:  # nothing is called here, where the next signal would be raised
                    call.options.terminate = True
        if failed := interrupt or call.error:
            raise failed
        if not call.over:
            raise RuntimeError("The runner was closed.")

    def end(self) -> None:
        """End the call that runs, if calls are ended at all; from any thread."""
        if (options := self._running) is not None:
            self._terminate(options)

    def _terminate(self, options: Any) -> None:
        if self._endable:
            options.terminate = True

    def close(self) -> None:
        """End the thread, when the call that runs is over."""
        self._stop()
        if self._thread is not None:
            self._thread.join()


def _serve(queue: SimpleQueue[_Call | None]) -> None:
    """Make calls until there are no more."""
    while (call := queue.get()) is not None:
        call.make()
        del call  # its memory is not held while the next one is waited for


def run_options(provider: Provider, graph: int) -> Any:
    """Return options of a run: of the graph with this number where the provider has graphs, else of none."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # errors are raised, and reported once
    if provider.graphs:
        options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
