"""A server without a network, for one client."""

from __future__ import annotations

import sys

from .batch.rows import LINE_BYTES
from .models import Models
from .server import SWITCH_SECONDS, Server
from .settings import ServerConfig

NO_LIMIT, ENDLESS_SECONDS = 1 << 20, 1e9


def private_server(models: Models) -> Server:
    """Return a server for one client that trusts itself, so that no limits but the model's apply."""
    sys.setswitchinterval(SWITCH_SECONDS)
    config = ServerConfig(max_body=LINE_BYTES, max_samples=NO_LIMIT, max_stops=NO_LIMIT, max_stop_chars=NO_LIMIT,
                          max_requests=NO_LIMIT, max_queue=NO_LIMIT, request_seconds=ENDLESS_SECONDS)
    return Server(config, models)
