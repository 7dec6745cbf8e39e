"""The process of a worker: a model and the endpoints of a server, without a network of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from ..errors import EdgeInferError
from .job import Refused

if TYPE_CHECKING:
    from ..llm import LLM
    from ..server import Answered, InProcess, Models
    from .handing import Piece
    from .job import Facts, Identity, Item, Job, Prefilled
    from .serving import Serving

PROBES, PROBE_BYTES = 3, 4 << 20
"""Transfers that measure the way from one replica to another."""


def planned(source: str, options: dict[str, Any]) -> int | Refused:
    """Return the memory that a model needs here beside its endpoints, and open nothing; or why it cannot be opened."""
    from ..llm import plan_model
    from ..server import SERVER_BYTES

    try:
        left = max(1, options["budget"] - SERVER_BYTES)
        return plan_model(model=source, **{**options, "budget": left}).total_bytes + SERVER_BYTES
    except EdgeInferError as error:
        return Refused(str(error), error.code, error.exit_code)


class Engine:
    """Answers requests in a process that Ray has started; its methods are called from elsewhere."""

    def __init__(self) -> None:
        self._answers: InProcess | None = None
        self._serving: Serving | None = None
        self._models: Models | None = None
        self._identity: Identity | None = None
        self._opening = asyncio.Lock()
        self._items: dict[int, AsyncGenerator[Item, None]] = {}
        """Jobs that run and were not cancelled."""
        self._read = set[int]()
        """Jobs whose next item somebody waits for."""

    async def open(self, name: str, source: str, options: dict[str, Any]) -> Identity | Refused:
        """Open the model once; return its description, or why it cannot be opened."""
        async with self._opening:
            if self._identity is None:
                try:
                    self._identity = await self._open(name, source, options)
                except EdgeInferError as error:
                    return Refused(str(error), error.code, error.exit_code)
            return self._identity

    async def facts(self) -> Facts:
        """Return the properties of the open model."""
        from ..server import in_thread
        from .serving import facts_of

        return await in_thread(lambda: facts_of(self._llm))

    async def post(self, url: str, body: bytes) -> Answered | None:
        """Return the answer to a request; None if the model is not open, as after a new start of this process."""
        return None if self._answers is None else await self._answers.post_to(url, body)

    async def begin(self, job: Job) -> Item | None:
        """Begin a job, and return its first item; None if the model is not open."""
        if self._serving is None:
            return None
        self._items[job.key] = self._serving.run(job)
        return await self.more(job.key)

    async def more(self, key: int) -> Item | None:
        """Return the next item of a job; None if this process has not begun it."""
        if (items := self._items.get(key)) is None:
            return None
        self._read.add(key)
        try:
            item = await anext(items)
        except BaseException:
            self._items.pop(key, None)
            raise
        finally:
            self._read.discard(key)
        if not isinstance(item, list) or key not in self._items:  # it was cancelled, and no next part is wanted
            self._items.pop(key, None)
            await items.aclose()
        return item

    async def prefill(self, job: Job) -> bool | None:
        """Begin to compute the prompt of a job for another replica, if that is possible; None if no model is open."""
        return None if self._serving is None else self._serving.prefill(job)

    async def prefilled(self, key: int) -> Prefilled | None:
        """Return when such a prompt is complete; None if it could not be computed."""
        return None if self._serving is None else await self._serving.prefilled(key)

    async def piece(self, key: int, offset: int) -> Piece | None:
        """Return the KV blocks of a prompt computed so far; None if this process does not compute it."""
        return None if self._serving is None else await self._serving.handing.piece(key, offset)

    async def probe(self, nbytes: int) -> bytes:
        """Return so many bytes, whose way is measured."""
        return bytes(nbytes)

    async def link(self, sender: Any) -> float:
        """Return the seconds that a byte takes from another process: the best of a few pieces."""
        seconds = []
        for _ in range(PROBES):
            began = time.perf_counter()
            await sender.probe(PROBE_BYTES)
            seconds.append(time.perf_counter() - began)
        return min(seconds) / PROBE_BYTES

    async def watch(self) -> None:
        """Return at the end of this process, which Ray reports to the caller as an error."""
        await asyncio.Event().wait()

    async def cancel(self, key: int) -> None:
        """End a job, if it runs."""
        if self._serving is not None:
            self._serving.cancel(key)
        if (items := self._items.pop(key, None)) is not None and key not in self._read:
            await items.aclose()

    @property
    def _llm(self) -> LLM:
        assert self._models is not None
        return self._models.first.model

    async def _open(self, name: str, source: str, options: dict[str, Any]) -> Identity:
        from ..server import InProcess, Models, private_server
        from .serving import Serving, identity_of

        def opened(source: str, left: int | None) -> LLM:
            from ..llm import LLM

            return LLM(source, **{**options, "budget": left})

        models = Models({name: source}, opened, options["budget"], 1e9)
        server = private_server(models)
        await models.open(models.first)
        server.ready = True
        self._answers, self._models = InProcess(server), models
        self._serving = Serving(self._llm)
        return identity_of(self._llm)
