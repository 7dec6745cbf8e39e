"""The process of a worker: a model and the endpoints of a server, without a network of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import __version__
from ..errors import EdgeInferError

if TYPE_CHECKING:
    from ..llm import LLM
    from ..server import Answered, InProcess, Models


class Identity(NamedTuple):
    """Parts on which the bits of an answer depend."""

    version: str
    bundle: str
    arithmetic: str


class Engine:
    """Answers requests in a process that Ray has started; its methods are called from elsewhere."""

    def __init__(self) -> None:
        self._answers: InProcess | None = None
        self._opening = asyncio.Lock()
        self._identity: Identity | None = None
        self._models: Models | None = None

    async def room(self) -> int:
        """Return the bytes that this machine can give."""
        from ..memory_planner import process_budget

        return process_budget()

    async def open(self, name: str, source: str, options: dict[str, Any]) -> Identity | str:
        """Open the model once; return what it is, or the sentence that says why it cannot be opened."""
        async with self._opening:
            if self._identity is None:
                try:
                    self._identity = await self._open(name, source, options)
                except EdgeInferError as error:
                    return str(error)
            return self._identity

    async def planned_bytes(self) -> int:
        """Return the memory of the open model's plan."""
        assert self._models is not None
        return self._models.first.model.plan.total_bytes

    async def post(self, url: str, body: bytes) -> Answered | None:
        """Return the answer to a request; None if the model is not open, as after a new start of this process."""
        return None if self._answers is None else await self._answers.post_to(url, body)

    async def _open(self, name: str, source: str, options: dict[str, Any]) -> Identity:
        from ..server import InProcess, Models, private_server

        def opened(source: str, left: int | None) -> LLM:
            from ..llm import LLM

            return LLM(source, **{**options, "budget": left})

        models = Models({name: source}, opened, options["budget"], 1e9)
        server = private_server(models)
        await models.open(models.first)
        server.ready = True
        self._answers, self._models = InProcess(server), models
        session = models.first.model.session
        return Identity(__version__, session.bundle.identity, session.executor.kernels.arithmetic)
