"""State of the server: its page, health, models, metrics and description."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

import psutil

from .. import __version__
from .errors import NOT_FOUND, ApiError, ending
from .http import Call, Reply
from .metrics import CONTENT_TYPE
from .models import Served, in_thread, loading

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


async def health(call: Call) -> Reply:
    """Return whether requests are served."""
    if call.server.draining:
        raise ending()
    if not call.server.ready:
        raise loading()
    return Reply({"status": "ok"})


async def models(call: Call) -> Reply:
    """Return the models that requests may name."""
    return Reply({"object": "list", "data": [_model(one) for one in call.server.models.all.values()]})


async def model(call: Call) -> Reply:
    """Return one model."""
    return Reply(_model(call.server.models.find(call.params["name"])))


def _model(one: Served) -> dict[str, Any]:
    about: dict[str, Any] = {"id": one.name, "object": "model", "created": one.opened, "owned_by": "edgeinfer"}
    if one.llm:
        about["max_model_len"] = one.room
    return about


async def status(call: Call) -> Reply:
    """Return the memory of the open models, and that of the process beside their plans."""
    open_models = [{"name": one.name, **one.model.state()._asdict(), "context": one.room,
                    "chat": one.format is not None,
                    "replicas": [each._asdict() for each in one.model.replicas()]}
                   for one in call.server.models.open_models()]
    return Reply({"version": __version__, "ready": call.server.ready, "models": open_models,
                  "planned_bytes": call.server.models.planned_bytes,
                  "resident_bytes": psutil.Process().memory_info().rss})


async def metrics(call: Call) -> Reply:
    """Return the metrics for Prometheus."""
    return Reply(call.server.metrics.text(), kind=CONTENT_TYPE)


@cache
def _page() -> tuple[bytes, str]:
    """Return the page, and a content policy that allows nothing outside it."""
    import base64

    data = (resources.files(__package__) / "page.html").read_bytes()
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(data.decode("utf-8")):
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = (f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
              "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
              "require-trusted-types-for 'script'; trusted-types 'none'")
    return data, policy


async def page(call: Call) -> Reply:
    """Return the chat page."""
    data, policy = _page()
    return Reply(data, kind="text/html; charset=utf-8", headers={
        "content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-cache"})


async def plan(call: Call) -> Reply:
    """Return the plan page: the memory that a model needs on a device, and its speed there."""
    planner = call.server.planner
    if planner is None:
        raise ApiError(404, "This server has no plan page.", NOT_FOUND, code="not_found")
    async with call.server.planning:  # a page takes a processor for a fraction of a second
        data, policy, status = await in_thread(lambda: planner(call.query))
    return Reply(data, status, "text/html; charset=utf-8", {
        "content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-cache"})
