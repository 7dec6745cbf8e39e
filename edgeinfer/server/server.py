"""The server: its models, its counts, and the application that answers on its paths."""

from __future__ import annotations

import asyncio
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.cache_dir import cache_root
from . import anthropic, batches, chat, completions, embeddings, files, ollama, responses, status, tokens
from .errors import NOT_FOUND, ApiError, anthropic_error, ending, ollama_error, openai_error
from .guards import Guards, failure_of
from .http import Call, Endpoint, Handler, Receive, Reply, Scope, Send, respond
from .metrics import Metrics
from .models import Models, loading

if TYPE_CHECKING:
    from .answers import Answer
    from .settings import ServerConfig

OPENAI: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat.complete), ("POST", "/v1/completions", completions.complete),
    ("POST", "/v1/responses", responses.respond), ("POST", "/v1/embeddings", embeddings.embed),
    ("POST", "/v1/rerank", embeddings.rerank), ("GET", "/v1/models", status.models),
    ("GET", "/v1/models/{name:path}", status.model), ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
)
"""Method, path and handler of OpenAI's API and of extensions that other servers have made."""
BATCHES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/files", files.files), ("GET", "/v1/files/{name}", files.file),
    ("DELETE", "/v1/files/{name}", files.delete), ("GET", "/v1/files/{name}/content", files.content),
    ("POST", "/v1/batches", batches.create), ("GET", "/v1/batches", batches.batches),
    ("GET", "/v1/batches/{name}", batches.batch), ("POST", "/v1/batches/{name}/cancel", batches.cancel),
)
UPLOADS: tuple[tuple[str, str, Handler], ...] = (("POST", "/v1/files", files.upload),)
"""Paths whose bodies are files."""
OLLAMA: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/api/chat", ollama.chat), ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama.embed), ("GET", "/api/tags", ollama.tags), ("POST", "/api/show", ollama.show),
    ("GET", "/api/ps", ollama.running),
)
ANTHROPIC: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/messages", anthropic.message), ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
)


Planner = Callable[[Mapping[str, str]], tuple[bytes, str, int]]
UPLOADS_AT_ONCE = 2
"""Files that are received together, as each is in memory; further ones wait."""
SWITCH_SECONDS = 0.0005
"""Time that a thread of Python may keep others waiting: the engine's thread has a few microseconds to do at a time."""


async def openapi(call: Call) -> Reply:
    """Return the OpenAPI description of the server."""
    from .openapi import description

    return Reply(description(ALL))


PUBLIC: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", status.page), ("GET", "/plan", status.plan), ("GET", "/health", status.health),
    ("GET", "/v1/health", status.health),
    ("GET", "/metrics", status.metrics), ("GET", "/status", status.status), ("GET", "/openapi.json", openapi),
    ("GET", "/api/version", ollama.version),
)
"""Paths that answer while models are loading, too."""
ALL = (*OPENAI, *BATCHES, *UPLOADS, *OLLAMA, *ANTHROPIC, *PUBLIC)


def print_line(line: str) -> None:
    """Print a line of the log on standard error, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{line}\n")


class Server:
    """State that all requests share.

    Parameters
    ----------
    config : ServerConfig
    models : Models
    log : called with a line for each request
    planner : returns the plan page for a query of the address, its content policy and status

    Attributes
    ----------
    ready, draining : bool
        Whether the first model is open, and whether the server is about to end.
    requests : Counter
        Requests at work, by the salt of their key.
    answers : set of Answer
        Generations at work.
    """

    def __init__(self, config: ServerConfig, models: Models, log: Callable[[str], object] = print_line,
                 planner: Planner | None = None):
        self.config, self.models, self.log, self.planner = config, models, log, planner
        self.planning = asyncio.Semaphore(1)
        self.ready = self.draining = False
        self.requests: Counter[bytes] = Counter()
        self.uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self.answers: set[Answer] = set()
        self.metrics = Metrics(self)
        name = re.sub(r"[^\w.-]", "_", models.first.name)
        self.batches = batches.Batches(self, Path(config.batch_dir) if config.batch_dir else
                                       cache_root() / "batches" / name)

    def check_ready(self) -> None:
        """Raise `ApiError` unless requests are served."""
        if self.draining:
            raise ending()
        if not self.ready:
            raise loading()

    def log_failure(self, error: BaseException) -> None:
        """Log where a bug is."""
        self.log("".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip())

    @property
    def n_requests(self) -> int:
        """Requests at work."""
        return sum(self.requests.values())

    async def drain(self) -> None:
        """Let running requests end within their time, then end them with the text generated so far."""
        self.draining = True
        await self.batches.close()
        deadline = asyncio.get_running_loop().time() + self.config.drain_seconds
        while self.n_requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for one in tuple(self.answers):
            one.cancel()


def application(server: Server) -> Any:
    """Return the ASGI application."""
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Route, Router

    routes = [Route(path, Endpoint(server, handler, failed, table is PUBLIC, "max_file" if table is UPLOADS else
                                   "max_body"), methods=[method])
              for table, failed in ((OPENAI, openai_error), (BATCHES, openai_error), (UPLOADS, openai_error),
                                    (OLLAMA, ollama_error), (ANTHROPIC, anthropic_error), (PUBLIC, openai_error))
              for method, path, handler in table]
    app: Any = Router(routes, redirect_slashes=False, default=_Missing({path for _, path, _ in ALL}))
    if server.config.cors_origins:
        app = CORSMiddleware(app, server.config.cors_origins, allow_methods=["GET", "POST", "DELETE"],
                             allow_headers=["*"])
    return Guards(_Methods(app), server)


class _Missing:
    """Answers on paths that do not exist."""

    def __init__(self, paths: set[str]):
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        path = scope["path"][:200]
        known = ", ".join(sorted(one for one in self.paths if "{" not in one))
        error = ApiError(404, f"There is nothing at {path!r}; the paths are {known}.", NOT_FOUND, code="not_found")
        await respond(send, Reply(failure_of(path)(error), 404))


class _Methods:
    """Makes the router's answer to a wrong method an object as all other errors are."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        refused = False

        async def sending(message: Any) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 405:
                refused = True
                allowed = dict(message["headers"]).get(b"allow", b"").decode()
                error = ApiError(405, f"{scope['method']} is not served here; use {allowed}.", code="wrong_method")
                await respond(send, Reply(failure_of(scope["path"])(error), 405, headers={"allow": allowed}))
            elif not refused:
                await send(message)

        await self.app(scope, receive, sending)
