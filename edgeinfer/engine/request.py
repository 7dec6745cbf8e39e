"""A request as its client holds it: text as it comes, the outcome, and a way to end it."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, NamedTuple

from ..base.process import check_process
from ..errors import RequestError
from .task import Result, Task

if TYPE_CHECKING:
    from ..runner import Sequence
    from .completion import Completion
    from .engine import Engine
    from .remote_prompts import RemotePrompt

WAIT_SECONDS = 0.1
"""Longest wait before Python looks at signals again, on systems where a signal does not end the wait."""
_numbers = count()


class _End(NamedTuple):
    error: BaseException | None


class Request(Generic[Result]):
    """A task on its way through the engine.

    The client's thread calls `start`, `next_piece`, `finish` and `close`; any thread and signal handlers call `cancel`;
    the engine's thread calls the rest. While a request waits it belongs to the caller that claims it first: the engine,
    to run it, or who cancels it, to end it at once, whatever forward pass the engine is in.

    Parameters
    ----------
    engine : Engine or None
        None for a request that its own thread runs (`step.run_alone`).
    task : Task
    reuse : share KV blocks of the prefix cache, and leave the request's own there
    prompt_cache : file to take the prompt's KV blocks from, and to write them to
    salt : requests share blocks only with those of the same salt

    Attributes
    ----------
    number : int
        Requests that were made later have larger ones.
    """

    def __init__(self, engine: Engine | None, task: Task[Result], reuse: bool = False, prompt_cache: Path | None = None,
                 salt: bytes = b""):
        self.task, self.reuse, self.prompt_cache, self.salt = task, reuse, prompt_cache, salt
        self.number = next(_numbers)
        self.arrived = 0.0
        """Time at which the engine accepted it, by time.monotonic()."""
        self.saves_prompt = True
        """Write a prompt that its file lacks there."""
        self.saved_tokens = 0
        """Tokens of the prompt that its file has."""
        self.on_prompt: Callable[[Sequence], None] | None = None
        """Called by the engine's thread with the sequence after each part of the prompt."""
        self.remote_prompt: RemotePrompt | None = None
        """The prompt's KV blocks, if another process has computed them."""
        self.ended = False
        self.on_event: Callable[[], None] | None = None
        """Called by the engine's thread when there is text to be read, and at the end."""
        self.headers: dict[str, str] = {}
        """Headers of its answer over HTTP."""
        self.every_step = False
        """Call `on_event` after each step of this request; its client reads the samples (`progress.Progress`)."""
        self._engine = engine
        self._started = self._whole = False
        self._claims: deque[None] = deque([None])  # whose `pop` gives one thread the request
        self._pieces: SimpleQueue[str | _End] = SimpleQueue()
        self._outcome: _End | None = None

    # -- the client's side -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hand it to the engine, once; raises `ClosedError` if that is closed, `QueueFullError` if too many wait."""
        if self._engine is not None:
            self._hand_in(self._engine.submit)

    def _hand_in(self, how: Callable[[Request[Result]], None]) -> None:
        if self._started or self.ended:
            return
        self._started = True
        try:
            how(self)
        except BaseException:
            self._leave()
            raise

    def receive(self, part: bytes | memoryview | None, told: Callable[[], object]) -> None:
        """Let KV blocks of the prompt be written that another process computes, in order, before the request starts.

        They are those of all tokens but the last. None frees them, so that the prompt is computed here.

        Parameters
        ----------
        part : as `Runner.read_blocks` returns it
        told : called when they are written, or will not be; then `remote_prompt.error` says why
        """
        from .remote_prompts import Part, RemotePrompt

        assert self._engine is not None
        self.remote_prompt = self.remote_prompt or RemotePrompt(self.task.prompt_ids[:-1])
        self._engine.receive(Part(self.remote_prompt, part, told))

    def next_piece(self) -> str | None:
        """Return the next text, or None at the end; raises the error that the request ended with."""
        if self._engine is not None and not self.ended:
            self._engine.check_outside()
        self.start()
        try:
            piece = self._next()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise
        if isinstance(piece, str):
            return piece
        self._pieces.put(piece)  # for the caller that asks again
        if piece.error is not None and self._outcome is None:
            self._outcome = piece
            raise piece.error
        self._outcome = piece
        return None

    def start_whole(self) -> None:
        """Hand it to the engine for a client that reads no text before the end."""
        self._whole = self._whole or not self._started
        self.start()

    def finish(self) -> Result:
        """Run to the end and return the outcome."""
        self._whole = self._whole or not self._started
        if self._engine is not None:
            self._hand_in(self._engine.run)
        while self.next_piece() is not None:
            pass
        return self.task.result()

    def cancel(self) -> None:
        """Cancel this request within 100 ms, whether it runs or waits; from any thread and from signal handlers."""
        self.task.cancel()
        self._leave()

    def close(self) -> None:
        """End the request and wait until it has ended; unfinished samples count as cancelled."""
        if self._engine is None or self._engine.process != os.getpid():  # forked: it continues in the parent
            self.ended = True
            return
        self.cancel()
        if not self.ended and not self._engine.inside:
            self._wait_for_end()

    def _leave(self) -> None:
        """End the request if it waits."""
        if self.claim():
            self.emit(self.task.end())
            self.conclude()

    def belongs_to(self, engine: Engine) -> bool:
        """Return whether it is a request of this engine."""
        return self._engine is engine

    def waiting_pieces(self) -> list[str | None]:
        """Return the texts that are there without waiting for more, at the end None; raises as `next_piece`."""
        found: list[str | None] = []
        while not self._pieces.empty() and (not found or found[-1] is not None):
            found.append(self.next_piece())
        return found

    def _next(self) -> str | _End:
        while True:
            try:
                return self._pieces.get(timeout=WAIT_SECONDS)
            except Empty:
                if self._engine is not None:
                    check_process(self._engine.process)  # forked: no thread works on it here

    def _wait_for_end(self) -> None:
        """Wait for the end, and drop unread text."""
        unread = [self._next()]
        while isinstance(unread[-1], str):
            unread.append(self._next())
        for piece in unread:
            self._pieces.put(piece)

    # -- the engine's side -------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Take a request that waits, to run it or to end it; returns False if another thread was faster."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    def requeue(self) -> None:
        """Let a request wait that was claimed."""
        self._claims.append(None)

    def emit(self, text: str) -> None:
        """Hand text to the client; one that waits for the outcome alone is not woken."""
        wakes = self.every_step
        if text and not self._whole:
            self._pieces.put(text)
            wakes = True
        if wakes and self.on_event is not None:
            self.on_event()

    def conclude(self, error: BaseException | None = None) -> None:
        """End the request, with an error for its client if there is one."""
        if not self.ended:
            self.ended = True
            self._pieces.put(_End(error))
            if self.on_event is not None:
                self.on_event()


class Stream:
    """The text of one request, piece by piece: a piece is the text that a token completes, or the texts of 20 ms.

    The request continues while its stream is not read. Leaving a loop over it early ends the request, once the stream
    is closed or no longer referred to.
    """

    def __init__(self, request: Request[Completion]):
        self._request = request
        weakref.finalize(self, request.cancel).atexit = False

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

    def belongs_to(self, engine: Engine) -> bool:
        """Return whether it is a request of this engine."""
        return self._request.belongs_to(engine)

    def close(self) -> None:
        """End the request; its finish reason is ``cancelled`` unless it was over."""
        self._request.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The outcome, once the stream has ended; raises `RequestError` before."""
        if not self._request.ended:
            raise RequestError("The stream has not ended; read it to its end or close it.")
        return self._request.task.result()
