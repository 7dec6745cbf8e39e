"""Settings of a server: address, access and limits."""

from __future__ import annotations

import math
import re
from typing import Any

from ..base.dataclass import dataclass
from ..base.validation import FLAG, TEXT, TEXTS, check_fields, integer, number, option
from ..errors import UsageError

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only programs of this machine reach."""
MIN_KEY_BYTES = 8
"""Shortest API key: shorter ones could be brute-forced."""


def _seconds(default: float) -> Any:
    return option(default, number(lambda s: 0 < s < math.inf, "a number of seconds above 0"))


def _count(default: int) -> Any:
    return option(default, integer(1, 1 << 40, "1 or more"))


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server.

    Raises
    ------
    UsageError
        A value is out of its range, a key is too short, or the server would be open to the network without a key.
    """

    host: str = option("127.0.0.1", TEXT)
    """Address to listen on."""
    port: int = option(8080, integer(0, 65535, "from 0 (any free one) to 65535"))
    api_keys: tuple[str, ...] = option((), TEXTS)
    """Keys, one of which each request has to have; without any, all requests are served."""
    insecure: bool = option(False, FLAG)
    """Listen on addresses that other machines reach without any key."""
    cors_origins: tuple[str, ...] = option((), TEXTS)
    """Origins of web pages that may use the server, such as ``https://chat.example.org``; ``*`` is all."""
    max_body: int = _count(1 << 20)
    """Bytes of a request."""
    max_file: int = _count(16 << 20)
    """Bytes of a file of requests, which is in memory while it is sent."""
    batch_dir: str = option("", TEXT)
    """Folder of files and batches; empty is one of the cache, by the name of the first model."""
    max_samples: int = _count(16)
    """Texts that one request may ask for (n, or prompts of a list)."""
    max_stops: int = _count(16)
    """Maximum number of stop strings per request."""
    max_stop_chars: int = _count(1024)
    """Characters of a stop string."""
    max_queue: int = _count(256)
    """Maximum number of requests that wait for a model."""
    max_requests: int = _count(64)
    """Requests that one key, or all clients without one, may have at once."""
    request_seconds: float = _seconds(600.0)
    """Time after which a request ends with the text generated so far."""
    read_seconds: float = _seconds(30.0)
    """Time in which a client has to send the headers of a request, and then its body."""
    drain_seconds: float = _seconds(30.0)
    """Time that running requests have after SIGTERM or Ctrl-C."""
    keep_alive_seconds: float = _seconds(300.0)
    """Time after its last request until a further model is unloaded."""
    log_prompts: bool = option(False, FLAG)
    """Write prompts and answers to the log."""

    def __post_init__(self) -> None:
        check_fields(self)
        for key in self.api_keys:
            if len(key) < MIN_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(f"An API key has {len(key)} characters; a key has at least {MIN_KEY_BYTES} "
                                 "printable ASCII characters without spaces.")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors-origin is {origin!r}; write it as browsers do, such as "
                                 "https://chat.example.org without a path, or * for all.")
        if not self.on_loopback and not self.api_keys and not self.insecure:
            raise UsageError(f"--host {self.host} is open to other machines; add --api-key, or --insecure if anybody "
                             "may use this server.")

    @property
    def on_loopback(self) -> bool:
        """True if only programs of this machine reach it."""
        return self.host in LOOPBACK or self.host.startswith("127.")
