"""The class `AsyncLLM`: an open model for programs on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .api import LLM

if TYPE_CHECKING:
    from ..engine import Completion, Request, Score
    from .options import ChatOptions, Messages, Prompt, RequestOptions, Unpack

T = TypeVar("T")


class AsyncLLM:
    """An open model whose requests are awaited. An asynchronous context manager.

    Requests run together with those of other tasks and threads. One whose task is cancelled, or whose stream is left,
    ends within 100 ms.

    Parameters
    ----------
    model : str or Path
    options
        Both as for `LLM`, and raise as there. The model is opened when the context is entered, in a thread of its own.

    Attributes
    ----------
    llm : LLM
        The model below, which threads can use at the same time.

    Examples
    --------
    >>> async def main():
    ...     async with AsyncLLM("demo") as llm:
    ...         async for piece in llm.stream("Once upon a time"):
    ...             print(piece, end="")
    """

    llm: LLM

    def __init__(self, model: str | Path, **options: Any):
        self._open = partial(LLM, model, **options)

    async def __aenter__(self) -> AsyncLLM:
        self.llm = await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests and give all memory back."""
        await asyncio.to_thread(self.llm.close)

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> str:
        """Return the continuation of a text; see `LLM.generate`."""
        return (await self.complete(prompt, **options)).text

    async def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Return the continuation of a text with tokens, times and finish reason; see `LLM.complete`."""
        return await self._finish(lambda: self.llm.request(prompt, options))

    async def chat(self, messages: Messages, *, tools: Messages | None = None, **options: Unpack[ChatOptions]) -> str:
        """Return the answer to a conversation; see `LLM.chat`."""
        return (await self._finish(lambda: self.llm.chat_request(messages, tools, options))).text

    async def score(self, prompt: Prompt, continuations: Iterable[Prompt]) -> list[Score]:
        """Return how likely the model finds each of several continuations; see `LLM.score`."""
        return await self._finish(lambda: self.llm.score_request(prompt, continuations))

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncIterator[str]:
        """Iterate over the continuation of a text as it grows; see `LLM.stream`."""
        return self._pieces(lambda: self.llm.request(prompt, options, stream=True))

    def chat_stream(self, messages: Messages, *, tools: Messages | None = None,
                    **options: Unpack[ChatOptions]) -> AsyncIterator[str]:
        """Iterate over the answer to a conversation as it grows; see `LLM.chat_stream`."""
        return self._pieces(lambda: self.llm.chat_request(messages, tools, options, stream=True))

    async def _finish(self, prepare: Callable[[], Request[T]]) -> T:
        request = await asyncio.to_thread(prepare)
        there = _event_of(request)
        try:
            request.start_whole()
            while not request.ended:
                await there.wait()
            return request.finish()
        finally:
            request.cancel()

    async def _pieces(self, prepare: Callable[[], Request[Completion]]) -> AsyncIterator[str]:
        request = await asyncio.to_thread(prepare)
        there = _event_of(request)
        try:
            request.start()
            while True:
                there.clear()
                for piece in request.waiting_pieces():
                    if piece is None:
                        return
                    yield piece
                await there.wait()
        finally:
            request.cancel()


def _event_of(request: Request[Any]) -> asyncio.Event:
    """Return an event of the running loop that the request sets when there is something to read."""
    loop, there = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits there
            loop.call_soon_threadsafe(there.set)

    request.on_event = tell
    return there
