"""Requests of ollama's API as types."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests."""

    model: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class Generating(Body, kw_only=True):
    """Fields of requests for text."""

    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatBody(Generating, kw_only=True):
    """Body of /api/chat."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class GenerateBody(Generating, kw_only=True):
    """Body of /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    images: list[str] | None = None
    raw: bool = False
    context: list[int] | None = None


class EmbedBody(Body, kw_only=True):
    """Body of /api/embed."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None


class ShowBody(Struct, kw_only=True):
    """Body of /api/show."""

    model: str = ""
    name: str = ""
    verbose: bool = False
