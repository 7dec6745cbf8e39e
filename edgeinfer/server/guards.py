"""Checks before any handler: the Host header, the origin of web pages and API keys; and the log's line afterwards."""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import TYPE_CHECKING, Any

from ..base.process import printable
from .errors import AUTHENTICATION, ApiError, anthropic_error, ollama_error, openai_error
from .http import Message, Receive, Reply, Scope, Send, encode, respond
from .settings import LOOPBACK

if TYPE_CHECKING:
    from .server import Server

OPEN_PATHS = ("/", "/plan", "/health", "/v1/health")
"""Paths that need no key: the page, which asks for one, that of plans, and the state of the server."""
SECURE = [(b"x-content-type-options", b"nosniff"), (b"server", b"edgeinfer")]
SALT_BYTES = 16


class Guards:
    """Middleware that every request passes first."""

    def __init__(self, app: Any, server: Server):
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, note = time.perf_counter(), dict[str, Any]()
        scope["state"] = {**scope.get("state", {}), "note": note, "salt": b""}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), *SECURE]
            await send(message)

        try:
            try:
                self._check(scope)
            except ApiError as error:
                note["error"] = error.message
                headers = {**error.headers, **self._readable(scope)}
                await respond(sending, Reply(failure_of(scope["path"])(error), error.status, headers=headers))
                return
            await self.app(scope, receive, sending)
        except Exception as error:
            self.server.log_failure(error)
            raise
        finally:
            self._log(scope, note, time.perf_counter() - began)

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        self._check_host(host)
        self._check_origin(headers.get(b"origin"), host)
        if self.server.config.api_keys and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            scope["state"]["salt"] = self._key(headers)

    def _check_host(self, host: str) -> None:
        """Refuse names that a page may have pointed at this machine (DNS rebinding)."""
        name = (host.rsplit(":", 1)[0] if not host.endswith("]") else host).lower()
        if self.server.config.on_loopback and name.strip("[]") not in (*LOOPBACK, self.server.config.host):
            raise ApiError(403, f"The Host header names {printable(host[:100])!r}, and this server answers to "
                                "localhost alone; use http://localhost, or another --host.", code="host_not_allowed")

    def _check_origin(self, origin: str | None, host: str) -> None:
        """Refuse web pages of other origins: a browser lets them send requests, although not read the answers."""
        allowed = self.server.config.cors_origins
        if origin is None or "*" in allowed or origin in allowed or origin.partition("://")[2] == host:
            return
        raise ApiError(403, f"Pages of {printable(origin[:100])!r} may not use this server; start it with "
                            "--cors-origin for them.", code="origin_not_allowed")

    def _readable(self, scope: Scope) -> dict[str, str]:
        """Return headers that let a page of an allowed origin read a refusal, as it reads all other answers."""
        origin, allowed = dict(scope["headers"]).get(b"origin", b"").decode("latin-1"), self.server.config.cors_origins
        if not origin or not ("*" in allowed or origin in allowed):
            return {}
        return {"access-control-allow-origin": "*" if "*" in allowed else origin, "vary": "Origin"}

    def _key(self, headers: dict[bytes, str]) -> bytes:
        """Return the salt of the request's key; raises `ApiError` unless it is one of the server's."""
        given = headers.get(b"authorization", "")
        given = given[7:].strip() if given[:7].lower() == "bearer " else headers.get(b"x-api-key", "")
        found = b""
        for key in self.server.config.api_keys:  # all of them, so that times tell nothing
            if hmac.compare_digest(key.encode(), given.encode("utf-8", "replace")):
                found = hashlib.sha256(key.encode()).digest()[:SALT_BYTES]
        if not found:
            what = "is none of this server's" if given else "is missing"
            raise ApiError(401, f"The API key {what}; send it as 'Authorization: Bearer KEY'.", AUTHENTICATION,
                           code="invalid_api_key")
        return found

    def _log(self, scope: Scope, note: dict[str, Any], seconds: float) -> None:
        line = {"time": round(time.time(), 3), "method": scope["method"], "path": scope["path"][:200],
                "status": note.pop("status", 499), "ms": round(1000 * seconds, 1), **note}
        if client := scope.get("client"):
            line["client"] = client[0]
        if salt := scope["state"]["salt"]:
            line["key"] = salt.hex()[:8]
        self.server.log(encode(line).decode())


def failure_of(path: str) -> Any:
    """Return the function that writes an error in the form of a path's API."""
    if path.startswith("/api/"):
        return ollama_error
    return anthropic_error if path.startswith("/v1/messages") else openai_error
