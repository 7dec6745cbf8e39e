"""Requests take turns at a runner, whichever thread they come from, and can be ended at any time."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..base.process import check_process
from ..errors import ClosedError, RequestError
from .completion import Completion

if TYPE_CHECKING:
    from ..runner import Runner, Sequence

Result = TypeVar("Result", covariant=True)

UNREAD_SECONDS = 30.0
"""Seconds that a request waits for another thread's abandoned stream."""
POLL_SECONDS = 0.05
"""Seconds between two looks at whether a request that waits was cancelled."""


class Task(Protocol[Result]):
    """Work of a request: `Generation`, `BeamSearch` or `Scoring`."""

    prompt_ids: list[int]

    @property
    def sequence(self) -> Sequence | None:
        """The sequence that holds the prompt."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""

    def start(self, sequence: Sequence) -> str:
        """Process the prompt; returns the first text."""

    def step(self) -> str:
        """Go on, and return the new text."""

    def cancel(self) -> None:
        """End within 100 ms; from any thread."""

    def end(self) -> None:
        """Finish unfinished samples as cancelled."""

    def release(self, keep_first: bool = False) -> Sequence | None:
        """Give the sequences back, or return the first."""

    def result(self) -> Result:
        """Return the outcome so far."""


class RequestQueue:
    """The turns at one runner, and the sequence that the next request may continue.

    Parameters
    ----------
    runner : belongs to the queue until `close`
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.closed = False
        self.process = os.getpid()
        self._turn = threading.Lock()  # taken by a request from its first step to its end
        self.step = threading.RLock()  # held while the runner is used
        self._owner: int | None = None
        self._active: Request[Any] | None = None
        self._kept: Sequence | None = None

    def check_open(self) -> None:
        """Raise `ClosedError` once the queue is closed, and `EdgeInferError` in a process that was forked."""
        if self.closed:
            raise ClosedError("The model was closed; open it again.")
        check_process(self.process)

    def cancel(self) -> None:
        """Cancel the running request, if there is one; from any thread or a signal handler."""
        request = self._active
        if request is not None:
            request.generation.cancel()

    def close(self) -> None:
        """End the running request and close the runner; requests that wait raise `ClosedError`."""
        self.closed = True
        self.cancel()
        if self.process != os.getpid():  # forked: the thread in a step does not exist here
            self.runner.close()
            return
        with self.step:  # a step that runs in another thread has ended
            if self._active is not None:
                self._active.end()
            self._kept = None
            self.runner.close()

    def take_turn(self, request: Request[Any]) -> bool:
        """Wait until no other request runs; returns False if the request was cancelled before.

        Raises
        ------
        RequestError
            This thread itself holds the turn, so that waiting would never end; or another thread's stream holds it, and
            that was not read for `UNREAD_SECONDS`.
        ClosedError
            The queue was closed meanwhile.
        """
        if self._owner == threading.get_ident():
            raise RequestError(
                "A stream of this model is still open in this thread; read it to its end or close it before the next "
                "request."
            )
        self.check_open()
        while not self._turn.acquire(timeout=POLL_SECONDS):
            if request.cancelled:
                return False
            holder = self._active
            if holder is not None and holder.unread_seconds > UNREAD_SECONDS:
                raise RequestError(
                    f"Another stream of this model is still open and has not been read for {UNREAD_SECONDS:.0f} s; "
                    "read it to its end or close it (stream.close()), then ask again.")
        if self.closed:
            self._turn.release()
            self.check_open()
        self._owner, self._active = threading.get_ident(), request
        return True

    def drop_turn(self) -> None:
        """End a turn in which nothing was done."""
        self.give_turn_back(self._kept)

    def give_turn_back(self, kept: Sequence | None) -> None:
        """End a turn; the next request may continue the `kept` sequence."""
        self._kept, self._active, self._owner = kept, None, None
        self._turn.release()

    def sequence(self, ids: list[int], reuse: bool, prompt_cache: Path | None) -> tuple[Sequence, int]:
        """Return a sequence that holds a proper prefix of the prompt, and how many of its tokens the cache file has."""
        sequence, self._kept = self._kept, None
        n_saved = 0
        if sequence is not None and not (reuse and self._kept_of(sequence, ids)):
            self.runner.release(sequence)
            sequence = None
        if sequence is None and prompt_cache is not None and os.path.exists(prompt_cache):
            sequence = self.runner.load(prompt_cache)
            n_saved = shared(sequence.tokens, ids, len(ids))
        if sequence is None:
            return self.runner.new_sequence(), 0
        kept = self._kept_of(sequence, ids)
        if kept < min(n_saved, len(ids) - 1):  # layers with a window lack what the prompt sees there: it is saved again
            n_saved = kept
        self.runner.truncate(sequence, kept)
        return sequence, n_saved

    def _kept_of(self, sequence: Sequence, ids: list[int]) -> int:
        """Return how many first tokens of a prompt a sequence can continue from: its last one's logits must be
        computed.
        """
        return self.runner.can_truncate(sequence, shared(sequence.tokens, ids, len(ids) - 1))


class Request(Generic[Result]):
    """A generation (or another task) with its turn: waits for it, steps, and gives everything back.

    Parameters
    ----------
    queue : where it waits
    generation : what it does
    reuse : continue the last request's sequence as far as the prompts agree, and leave one for the next
    prompt_cache : file to take the prompt's KV blocks from, and to write them to
    """

    def __init__(
        self, queue: RequestQueue, generation: Task[Result], reuse: bool = False, prompt_cache: Path | None = None
    ):
        self.generation = generation
        self.ended = self.cancelled = False
        self._queue = queue
        self._reading, self._read = False, time.monotonic()
        self._reuse = reuse
        self._prompt_cache = prompt_cache
        self._started = False
        self._state = threading.Lock()
        """Guards `_started` and `ended` until the request has its turn."""

    def finish(self) -> Result:
        """Run to the end and return the outcome."""
        while self.next_piece() is not None:
            pass
        return self.generation.result()

    def next_piece(self) -> str | None:
        """Return the next text that is not empty, or None at the end."""
        self._reading = True
        try:
            if not (self._started or self.ended) and not self._begin():
                return None
            while True:
                with self._queue.step:
                    piece = self._next()
                if piece != "":
                    return piece
        finally:
            self._read, self._reading = time.monotonic(), False
            if self.cancelled:  # it came while this was read, and left the end to us
                self.end()

    def _begin(self) -> bool:
        """Wait for the turn; returns False if the request has ended meanwhile."""
        if not self._queue.take_turn(self):
            self.end()
            return False
        with self._state:
            if self.ended:  # by another thread
                self._queue.drop_turn()
                return False
            self._started = True
        return True

    def belongs_to(self, queue: RequestQueue) -> bool:
        """Whether it waits in this queue."""
        return self._queue is queue

    @property
    def unread_seconds(self) -> float:
        """Seconds since the result was last read; 0 while it is being read."""
        return 0.0 if self._reading else time.monotonic() - self._read

    def cancel(self) -> None:
        """Cancel this request within 100 ms, whether it runs, waits or was abandoned; from any thread."""
        self.cancelled = True
        self.generation.cancel()
        if not self._reading:  # else the reader ends it
            self.end()

    def _next(self) -> str | None:
        """Take one step and return its text, or None if the request is over."""
        if self.ended:  # `close` of another thread may have ended it
            return None
        try:
            piece, finished = self._advance(), self.generation.finished
        except BaseException:  # Ctrl-C included: the turn must not stay taken
            self.end()
            raise
        if finished:
            self.end()
        return piece or (None if finished else "")

    def end(self) -> None:
        """Return sequences and turn; unfinished samples count as cancelled."""
        if self._queue.process != os.getpid():  # forked: the parent's request continues there, with the parent's model
            self.ended = True
            return
        with self._state:  # a request that has no turn yet does not wait for the step of another one
            if not self._started:
                if not self.ended:
                    self.ended = True
                    self.generation.end()
                return
        with self._queue.step:
            if self.ended:
                return
            self.ended, kept = True, None
            try:
                self.generation.end()
                kept = self.generation.release(keep_first=self._reuse and not self._queue.closed)
            finally:  # Ctrl-C may come while sequences are given back
                self._queue.give_turn_back(kept)

    def _advance(self) -> str:
        if self.generation.sequence is not None:
            return self.generation.step()
        ids = self.generation.prompt_ids
        sequence, n_saved = self._queue.sequence(ids, self._reuse, self._prompt_cache)
        piece = self.generation.start(sequence)
        if self._prompt_cache is not None and n_saved < len(ids) == len(sequence):
            self._queue.runner.save(sequence, self._prompt_cache)
        return piece


class Stream:
    """The text of one request, piece by piece: a piece is what a token completes, or several that take 20 ms together.

    Leaving a loop over it early ends the request, once the stream is closed or no longer referred to.
    """

    def __init__(self, request: Request[Completion]):
        self._request = request
        weakref.finalize(self, request.end).atexit = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._request.next_piece()
        if piece is None:
            raise StopIteration
        return piece

    def cancel(self) -> None:
        """End the request within 100 ms, also while another thread reads it; see `LLM.cancel`."""
        self._request.cancel()

    def belongs_to(self, queue: RequestQueue) -> bool:
        """Whether it is a request of this queue."""
        return self._request.belongs_to(queue)

    def close(self) -> None:
        """End the request; its finish reason is ``cancelled`` unless it was over."""
        self._request.end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The outcome, once the stream has ended; raises `RequestError` before."""
        if not self._request.ended:
            raise RequestError("The stream has not ended; read it to its end or close it.")
        return self._request.generation.result()


def shared(tokens: list[int], ids: list[int], most: int) -> int:
    """Return how many first tokens agree, `most` at most."""
    most = min(len(tokens), len(ids), most)
    return next((i for i in range(most) if tokens[i] != ids[i]), most)
