"""Requests of the engine as coroutines: text as it comes, and an end when the client leaves or time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine import Delta, Progress

if TYPE_CHECKING:
    from ..engine import Completion, Request
    from .http import Call

T = TypeVar("T")
SILENCE_SECONDS = 15.0
"""Time without text after which a stream says that it is alive: proxies close connections that are silent."""
GAP_SECONDS = 0.002
"""Least time between two events of a text: nobody sees a shorter one, and an event costs as much as a small model's
token."""


class Answer:
    """One generation.

    Parameters
    ----------
    request : Request
    call : Call
        Its log gets the figures of the request.
    """

    def __init__(self, request: Request[Completion], call: Call):
        self._request, self._call = request, call
        self._progress = Progress(request)
        self._arrivals = Arrivals(request)
        self.prompt_ids = request.task.prompt_ids
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._silent = False
        call.count(prompt_tokens=len(self.prompt_ids))

    def start(self) -> None:
        """Submit it to the engine; raises the error that refuses it."""
        self._request.start_whole()
        self._call.reply_headers.update(self._request.headers)
        server = self._call.server
        server.answers.add(self)
        loop = asyncio.get_running_loop()
        self._timers["over"] = loop.call_later(server.config.request_seconds, self._request.cancel)
        self._timers["silent"] = loop.call_later(SILENCE_SECONDS, self._say_alive)

    def cancel(self) -> None:
        """End it with the text generated so far."""
        self._request.cancel()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Iterate over new parts of the samples; a slow reader gets more at a time, and a long silence gives nothing.

        When the time of a request is over, it ends with the text generated so far.
        """
        request = self._request
        while not request.ended:
            await self._arrivals.wait()
            if not request.ended and ((found := self._progress.read()) or self._silent):
                self._silent = False
                yield found
        request.finish()  # raises the error that it ended with
        if found := self._progress.read():
            yield found

    async def whole(self) -> Completion:
        """Wait for the outcome."""
        self._request.every_step = False
        while not self._request.ended:
            await self._arrivals.wait()
        return self._request.finish()

    def _say_alive(self) -> None:
        """Let a stream say that it is alive, again and again."""
        self._silent = True
        self._arrivals.wake()
        self._timers["silent"] = asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._say_alive)

    @property
    def completion(self) -> Completion:
        """The outcome, or the text generated so far."""
        return self._request.task.result()

    def close(self) -> None:
        """End it, and write its figures to the log and into the metrics."""
        self._request.cancel()
        self._call.server.answers.discard(self)
        for timer in self._timers.values():
            timer.cancel()
        done = self.completion
        note = self._call.note
        self._call.count(completion_tokens=done.completion_tokens, cached_tokens=done.cached_tokens)
        note["finish_reason"] = done.finish_reason or "cancelled"
        if done.ttft_ms is not None:
            note["ttft_ms"] = round(done.ttft_ms, 1)
        if self._call.server.config.log_prompts:
            note["text"] = done.text
        self._call.server.metrics.ended(note.get("model", ""), self._request)


async def outcome(request: Request[T], start: Callable[[], None] | None = None) -> T:
    """Return the outcome of a request that has no text: scores, embeddings."""
    arrivals = Arrivals(request)
    try:
        (start or request.start_whole)()
        while not request.ended:
            await arrivals.wait()
        return request.finish()
    finally:
        request.cancel()


class Arrivals:
    """Wakes a coroutine when a request has something to read: at once at first and at the end, else not too often.

    Until the coroutine has read, the engine need not wake the loop again.
    """

    def __init__(self, request: Request[Any]):
        self._request, self._loop = request, asyncio.get_running_loop()
        self._there, self._told, self._next = asyncio.Event(), False, 0.0
        request.on_event = self._tell

    async def wait(self) -> None:
        """Wait until there is something."""
        await self._there.wait()
        self._there.clear()
        self._told, self._next = False, self._loop.time() + GAP_SECONDS

    def wake(self) -> None:
        """Let `wait` return."""
        self._there.set()

    def _tell(self) -> None:
        """Wake the loop, from the engine's thread."""
        if self._told and not self._request.ended:
            return
        self._told = True
        try:
            self._loop.call_soon_threadsafe(self._arrived)
        except RuntimeError:  # the loop is closed
            self._request.cancel()

    def _arrived(self) -> None:
        if self._request.ended or self._loop.time() >= self._next:
            self._there.set()
        else:
            self._loop.call_at(self._next, self._there.set)
