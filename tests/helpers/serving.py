"""A server of this process, and requests to it."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from edgeinfer import LLM
from edgeinfer.models import resolve
from tests.helpers.bundles import alter_header

TEMPLATE = """{%- if tools %}{{ '<|tools|>' }}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}
{%- endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %} {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
"""A chat template whose tool calls are those of Hermes."""


class Answered(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def events(self) -> list[Any]:
        """Data of server-sent events, without the last one of OpenAI's."""
        lines = self.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


class Running:
    """A server that runs in a thread."""

    def __init__(self, server: Any, port: int, log: list[str]):
        self.server, self.port, self.log = server, port, log
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> Answered:
        """Send a request, and return the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method or ("GET" if body is None else "POST"), path, data,
                               {name.replace("_", "-"): value for name, value in headers.items()})
            found = connection.getresponse()
            return Answered(found.status, found.read(), {k.lower(): v for k, v in found.getheaders()})
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """Return a connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def llm(self, name: str = "") -> LLM:
        """Return an open model."""
        return self.server.models.find(name).model  # type: ignore[no-any-return]

    def free(self) -> bool:
        """Return whether no request holds a block."""
        return self.llm().state().kv_usage == 0 and not self.server.answers


def until(found: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait for something to become true, and return whether it has."""
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.005)
    return found()


@contextmanager
def serving(models: dict[str, str], opener: Callable[[str, int | None], LLM] | None = None,
            budget: int | None = None, **settings: Any) -> Iterator[Running]:
    """Serve models from a thread of this process."""
    from edgeinfer.server import Models, Server, ServerConfig, bound
    from edgeinfer.server.program import http_server

    config = ServerConfig(**{"port": 0, **settings})

    def opened(source: str, left: int | None) -> LLM:
        return LLM(source, budget=left, ctx=512, threads=1, max_sequences=8, max_queue=config.max_queue)

    started, lines = threading.Event(), list[str]()
    with bound("127.0.0.1", config.port) as listener:
        kept: dict[str, Any] = {}

        async def main() -> None:
            server = Server(config, Models(models, opener or opened, budget, config.keep_alive_seconds), lines.append)
            web = http_server(server)
            kept.update(server=server, web=web, loop=asyncio.get_running_loop())
            await server.models.open(server.models.first)
            server.ready = True
            server.batches.resume()
            started.set()
            closing = asyncio.ensure_future(server.models.close_unused())
            await web.serve([listener])
            closing.cancel()
            await server.batches.close()
            await server.models.close()

        def run() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:
                kept["error"] = error
                started.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(120)
        if "error" in kept:
            raise kept["error"]
        try:
            yield Running(kept["server"], listener.getsockname()[1], lines)
        finally:
            kept["web"].should_exit = True
            thread.join(120)


def chat_model(folder: Path) -> str:
    """Return a copy of the demo model with a chat template."""
    bundle, name, data = folder / "chat", "chat_template.jinja", TEMPLATE.encode()
    shutil.copytree(resolve("demo"), bundle)
    (bundle / name).write_bytes(data)
    entry = {"name": name, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "part": ""}
    alter_header(bundle, lambda header: header["files"].append(entry))
    return str(bundle)
