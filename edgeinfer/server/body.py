"""The body of an HTTP request, within its limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from .errors import ApiError

if TYPE_CHECKING:
    from .settings import ServerConfig


class ClientLeft(Exception):
    """The client closed its connection before it had sent a whole request."""


async def body_of(scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
                  config: ServerConfig, limit: str) -> bytes:
    """Return the body of a request.

    Parameters
    ----------
    scope, receive : of ASGI
    config : ServerConfig
    limit : setting that limits its size

    Raises
    ------
    ApiError
        It is too large, or too slow.
    ClientLeft
    """
    most = getattr(config, limit)

    def too_large(n: int) -> ApiError:
        return ApiError(413, f"The body has {n} bytes or more; at most {most} are taken (--{limit.replace('_', '-')}).",
                        code="request_too_large")

    async def parts() -> bytes:
        found, n = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            found.append(message.get("body", b""))
            n += len(found[-1])
            if n > most:
                raise too_large(n)
            if not message.get("more_body"):
                return b"".join(found)

    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > most:
            raise too_large(int(value[:20]))
    try:
        return await asyncio.wait_for(parts(), config.read_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, f"The body did not arrive within {config.read_seconds:g} s; send it faster.",
                       code="timeout") from None
