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
        self._there = event_of(request)
        self.prompt_ids = request.task.prompt_ids
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._silent = False
        call.note["prompt_tokens"] = len(self.prompt_ids)

    def start(self) -> None:
        """Hand it to the engine; raises what refuses it."""
        self._request.start_whole()
        server = self._call.server
        server.answers.add(self)
        loop = asyncio.get_running_loop()
        self._timers["over"] = loop.call_later(server.config.request_seconds, self._request.cancel)
        self._timers["silent"] = loop.call_later(SILENCE_SECONDS, self._wake)

    def cancel(self) -> None:
        """End it with what there is."""
        self._request.cancel()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Iterate over what the samples get; a slow reader gets more at a time, and a long silence gives nothing.

        Where the time of a request is over it ends with what there is.
        """
        request = self._request
        while not request.ended:
            await self._wait()
            if not request.ended and ((found := self._progress.read()) or self._silent):
                self._silent = False
                yield found
        request.finish()  # raises what it ended with
        if found := self._progress.read():
            yield found

    async def whole(self) -> Completion:
        """Wait for the outcome."""
        self._request.every_step = False
        while not self._request.ended:
            await self._wait()
        return self._request.finish()

    def _wake(self) -> None:
        """Say that a stream is alive, again and again."""
        self._silent = True
        self._there.set()
        self._timers["silent"] = asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._wake)

    async def _wait(self) -> None:
        await self._there.wait()
        self._there.clear()

    @property
    def completion(self) -> Completion:
        """The outcome, or what there is of it."""
        return self._request.task.result()

    def close(self) -> None:
        """End it, and write its figures to the log and into the metrics."""
        self._request.cancel()
        self._call.server.answers.discard(self)
        for timer in self._timers.values():
            timer.cancel()
        done = self.completion
        note = self._call.note
        note["completion_tokens"], note["cached_tokens"] = done.completion_tokens, done.cached_tokens
        note["finish_reason"] = done.finish_reason or "cancelled"
        if done.ttft_ms is not None:
            note["ttft_ms"] = round(done.ttft_ms, 1)
        if self._call.server.config.log_prompts:
            note["text"] = done.text
        self._call.server.metrics.ended(note.get("model", ""), self._request)


async def outcome(request: Request[T], start: Callable[[], None] | None = None) -> T:
    """Return the outcome of a request that has no text: scores, embeddings."""
    there = event_of(request)
    try:
        (start or request.start_whole)()
        while not request.ended:
            await there.wait()
            there.clear()
        return request.finish()
    finally:
        request.cancel()


def event_of(request: Request[Any]) -> asyncio.Event:
    """Return an event of the running loop that the engine sets when there is something to read.

    While it is set the engine need not wake the loop again.
    """
    loop, there = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        if not there.is_set() or request.ended:
            try:
                loop.call_soon_threadsafe(there.set)
            except RuntimeError:  # the loop is closed
                request.cancel()

    request.on_event = tell
    return there
