"""A client of servers with OpenAI's API, on Python's own HTTP."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from ..errors import ContextError, EdgeInferError, RequestError, UsageError
from .strict_json import parse_json

MAX_BYTES = 64 << 20
"""Longest answer that is not a stream."""
SECONDS = 600.0
"""Longest time between two parts of an answer."""
FULL = "context_length_exceeded"
"""Code of a refusal because the conversation is too long."""
KEY_VARIABLE = "EDGEINFER_API_KEY"


class ApiClient:
    """Speaks to one server.

    Parameters
    ----------
    url : of the server, with or without ``/v1``
    key : API key; by default that of the environment variable ``EDGEINFER_API_KEY``

    Raises
    ------
    UsageError
        The URL is none of a server.
    """

    def __init__(self, url: str, key: str | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, self._port = parts.hostname, parts.port
        except ValueError:
            host = None
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"{url!r} is not the URL of a server; write it like http://localhost:8080.")
        self._host, self._secure, self.url = host, parts.scheme == "https", url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        key = key or os.environ.get(KEY_VARIABLE)
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def ask(self, path: str, body: Any = None) -> Any:
        """Return the JSON value of an answer; raises `RequestError` with the server's sentence if it refuses."""
        with closing(self._connected()) as connection:
            return parse_json(self._sent(connection, path, body).read(MAX_BYTES))

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """Yield the JSON values of an answer that is a stream of events; closing the iterator ends the request."""
        with closing(self._connected()) as connection:
            response = self._sent(connection, path, body)
            try:
                for line in response:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield self._checked(parse_json(data))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise EdgeInferError(f"The answer of {self.url} broke off: {error or type(error).__name__}.") from None

    def _connected(self) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=SECONDS,
                                               context=ssl.create_default_context())
        return http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)

    def _sent(self, connection: http.client.HTTPConnection, path: str, body: Any) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request("GET" if body is None else "POST", self._path + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise EdgeInferError(f"Cannot reach {self.url}: {getattr(error, 'strerror', None) or error or 'no answer'};"
                                 " check the address, and that the server runs.") from None
        if response.status != http.client.OK:
            sentence, code = _refusal(response)
            kind = ContextError if code == FULL else RequestError
            raise kind(f"{self.url} answered {response.status}: {sentence}")
        return response

    def _checked(self, event: Any) -> Any:
        if isinstance(event, dict) and isinstance(error := event.get("error"), dict):
            raise RequestError(f"{self.url} ended the answer: {error.get('message')}")
        return event


def _refusal(response: http.client.HTTPResponse) -> tuple[str, str]:
    """Return the sentence of a refusal, or its beginning if it is of another form, and its code."""
    data = response.read(1 << 16)
    try:
        error = parse_json(data)["error"]
        return (str(error["message"]), str(error.get("code"))) if isinstance(error, dict) else (str(error), "")
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace") or response.reason, ""
