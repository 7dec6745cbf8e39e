"""The server as a program: its socket, uvicorn, signals and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..base.files import os_errors
from ..base.process import printable
from ..errors import UsageError
from .errors import ApiError, openai_error
from .http import encode
from .server import SWITCH_SECONDS, Server, application

BACKLOG = 1024
MAX_HEADERS = 64 << 10
"""Bytes of the headers of a request."""
IDLE_SECONDS = 75
"""Time that a connection may be open between two requests."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; raises `UsageError` if it cannot."""
    with os_errors(UsageError, f"Cannot listen on {host} port {port}", "; choose another --port or --host."):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    return listener


def serve(server: Server, listener: socket.socket, opened: Callable[[], None]) -> None:
    """Serve until a signal; `opened` is called once the first model is open.

    Raises
    ------
    EdgeInferError
        The first model cannot be opened.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    asyncio.run(_Program(server, listener, opened).run())


class _Program:
    """The server between its start and its end."""

    def __init__(self, server: Server, listener: socket.socket, opened: Callable[[], None]):
        self._server, self._listener, self._opened = server, listener, opened
        self._http = http_server(server)
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Open the first model while requests are answered that it is being opened, and serve until a signal."""
        loop = asyncio.get_running_loop()
        with _signals(lambda: loop.call_soon_threadsafe(self._signalled)):
            serving = asyncio.ensure_future(self._http.serve([self._listener]))
            opening = asyncio.ensure_future(self._open())
            closing = asyncio.ensure_future(self._server.models.close_unused())
            try:
                await asyncio.wait({serving, opening}, return_when=asyncio.FIRST_EXCEPTION)
                if opening.done() and opening.exception():
                    self._http.should_exit = True
                await serving
                if opening.done() and not opening.cancelled():
                    opening.result()
            finally:
                opening.cancel()
                closing.cancel()
                if self._server.ready:
                    await self._server.models.close()

    async def _open(self) -> None:
        await self._server.models.open(self._server.models.first)
        self._server.ready = True
        self._server.batches.resume()
        self._opened()

    def _signalled(self) -> None:
        """Begin to end; at the second signal end at once."""
        if self._ending is not None:
            os._exit(1)
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        if self._server.ready:
            await self._server.drain()
        self._http.should_exit = True


class HttpServer(uvicorn.Server):
    """uvicorn's server, whose signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def http_server(server: Server) -> HttpServer:
    """Return uvicorn's server for the application.

    The log of requests replaces uvicorn's own.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return HttpServer(uvicorn.Config(
        application(server), http=_protocol(server), ws="none", loop="asyncio", lifespan="off",
        log_config=None, access_log=False, server_header=False, timeout_keep_alive=IDLE_SECONDS, backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEADERS, timeout_graceful_shutdown=1))


@contextlib.contextmanager
def _signals(signalled: Callable[[], Any]) -> Iterator[None]:
    """Call a function at SIGTERM and Ctrl-C."""
    def handle(number: int, frame: FrameType | None) -> None:
        signalled()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _not_http(server: Server, reason: str, client: tuple[str, int] | None) -> bytes:
    """Log a request that is not HTTP, and return its answer."""
    error = ApiError(400, f"The request is not HTTP: {printable(reason[:200])}", code="invalid_http")
    server.log(encode({"time": round(time.time(), 3), "status": 400, "error": error.message,
                       "client": client[0] if client else None}).decode())
    return encode(openai_error(error))


def _protocol(server: Server) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit on the time in which the headers of a request have to arrive."""

    class Protocol(H11Protocol):
        _slow: asyncio.TimerHandle | None = None
        _seconds = server.config.read_seconds

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._slow = self.loop.call_later(self._seconds, self._too_slow)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waits = self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)
            if waits and self._slow is None:
                self._slow = self.loop.call_later(self._seconds, self._too_slow)
            elif not waits and self._slow is not None:
                self._slow.cancel()
                self._slow = None

        def send_400_response(self, msg: str) -> None:
            """Return the error of a request that is not HTTP, in an object as all other errors."""
            body = _not_http(server, str(sys.exc_info()[1] or msg), self.client)
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            for event in (h11.Response(status_code=400, headers=list(headers.items())), h11.Data(data=body),
                          h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._slow is not None:
                self._slow.cancel()
            super().connection_lost(exc)

        def _too_slow(self) -> None:
            self._slow = None
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

    return Protocol
