"""Answering the rows of a batch: by the endpoints of a server in this process, as many at once as the model runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ...errors import EdgeInferError
from .. import chat, completions, embeddings
from ..errors import openai_error
from ..http import Call, Endpoint, encode, new_id
from .rows import URLS, Row

if TYPE_CHECKING:
    from ..server import Server

HANDLERS = {"/v1/chat/completions": chat.complete, "/v1/completions": completions.complete,
            "/v1/embeddings": embeddings.embed}
BUSY = (429, 503)
BUSY_SECONDS = 0.5
"""Wait before a row is tried again that the server had no room for."""
assert HANDLERS.keys() == URLS.keys()
LATER = (429, 500, 503)
"""Statuses of requests that were not answered, because of the server and not of the request: they end the run."""


class Answered(NamedTuple):
    """An answer as the server gives it."""

    status: int
    body: bytes
    note: dict[str, Any]
    """Figures of the request."""


class Answerer(Protocol):
    """Gives the answers to requests."""

    async def post(self, row: Row, body: bytes) -> Answered:
        """Return the answer to a row with this body."""


class InProcess:
    """The endpoints of a server, called without a network.

    Parameters
    ----------
    server : Server
    salt : of the key whose requests these are
    """

    def __init__(self, server: Server, salt: bytes = b""):
        self._salt = salt
        self._endpoints = {url: Endpoint(server, handler, openai_error) for url, handler in HANDLERS.items()}

    async def post(self, row: Row, body: bytes) -> Answered:
        """Return the answer to a row with this body."""
        return await self.post_to(row.url, body)

    async def post_to(self, url: str, body: bytes) -> Answered:
        """Return the answer to a request."""
        endpoint, note = self._endpoints[url], dict[str, Any]()
        scope = {"path": url, "headers": (), "state": {"note": note, "salt": self._salt}}
        reply = await endpoint.reply(Call(endpoint.server, scope, body))
        return Answered(reply.status, reply.body, note)


class Patient:
    """Tries rows again that the server has no room for now."""

    def __init__(self, answerer: InProcess):
        self._answerer = answerer

    async def post(self, row: Row, body: bytes) -> Answered:
        """Return the answer to a row."""
        while (found := await self._answerer.post(row, body)).status in BUSY:
            await asyncio.sleep(BUSY_SECONDS)
        return found


async def answer_all(rows: Iterable[Row], body_of: Callable[[Row], bytes], answerer: Answerer, at_once: int,
                     write: Callable[[Row, Answered], object]) -> None:
    """Answer rows, a number of them at once, in their order as far as one begins; `write` gets each that is answered.

    Raises
    ------
    EdgeInferError
        A request cannot be answered now: the model is closed, or the server ends. An error of `body_of` or `write` ends
        the others, too.
    """
    waiting = iter(rows)

    async def work() -> None:
        for row in waiting:
            answered = await answerer.post(row, body_of(row))
            if answered.status in LATER:
                raise EdgeInferError(msgspec.json.decode(answered.body)["error"]["message"])
            write(row, answered)

    workers = [asyncio.ensure_future(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def line_of(name: str, row: Row, answered: Answered) -> bytes:
    """Return the line of an answer in OpenAI's batch format."""
    return encode({"id": name, "custom_id": row.custom_id, "response": {
        "status_code": answered.status, "request_id": new_id("req_"), "body": msgspec.Raw(answered.body)},
        "error": None})
