"""Anthropic's messages: /v1/messages, whole or as events, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from msgspec import Struct

from ..engine import Completion
from . import messages
from .chat import message_of
from .conversation import Asked, Conversation, begin
from .errors import ApiError, anthropic_error
from .http import ALIVE, Call, Events, Reply, event, new_id
from .models import in_thread
from .sampling import at_least_one, form_of, only, options_of, refuse, renamed, template_of
from .tools import CallArguments, CallStart, Content, Event, Reasoning, Tool

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
THINKING_SIGNATURE = ""
"""Signature of reasoning, which this server does not sign."""


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Form of an answer, and the effort that it is worth."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class Counted(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/messages/count_tokens."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: Any = None
    context_management: Any = None
    output_config: OutputConfig | None = None
    betas: list[str] | None = None


class Body(Counted, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    mcp_servers: Any = None
    inference_geo: Any = None


async def message(call: Call) -> Reply | Events:
    """Answer a conversation."""
    body = call.read(Body)
    call.form_field = "output_config.format"
    at_least_one("max_tokens", body.max_tokens)
    refuse({"container": body.container, "mcp_servers": body.mcp_servers or None},
           {"mcp_servers": "give their functions as tools"})
    only("service_tier", body.service_tier, ("auto", "standard_only"))
    try:
        options = options_of(call.server.config, stop=body.stop_sequences, temperature=body.temperature,
                             top_p=body.top_p, top_k=body.top_k)
    except ApiError as error:
        raise renamed(error, "stop_sequences" if error.param == "stop" else str(error.param)) from None
    asked = _asked(body, options, body.max_tokens)
    async with AsyncExitStack() as held:
        served = await held.enter_async_context(call.server.models.using(body.model))
        talk = await begin(call, served, asked, held)
        head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": served.name}
        if body.stream:
            return Events(_Stream(head).events(talk), lambda error: event(anthropic_error(error), "error"),
                          held.pop_all())
        (piece,) = await talk.whole()
        return Reply({**head, "content": _blocks(piece.parts), **_stopped(piece.finish_reason, talk),
                      "usage": _usage(talk.answer.completion)})


def _asked(body: Counted, options: dict[str, Any], most: int | None) -> Asked:
    given = list(_messages(body.messages))
    if not given:
        raise ApiError(400, "messages is empty; give at least one.", param="messages")
    if given[-1][1]["role"] == "assistant":
        raise ApiError(400, "messages ends with one of the assistant, which this server does not continue; end with "
                            "one of the user.", param="messages")
    if body.system:
        given.insert(0, ("system", {"role": "system", "content": messages.text_of(body.system, "system")}))
    places, found = zip(*given, strict=True)
    tools, choice, parallel = _tools(body)
    only("thinking.type", kind := (body.thinking or {}).get("type"), ("enabled", "adaptive", "disabled"))
    config = body.output_config or OutputConfig()
    template = template_of({} if kind is None else {"enable_thinking": kind != "disabled"}, config.effort)
    return Asked(messages.template_messages(found, places), options, most,
                 form_of(config.format, name="output_config.format"), tools, choice, parallel, template)


def _tools(body: Counted) -> tuple[list[Tool], str | Tool, bool]:
    """Return the functions, which of them are to be called, and whether several may be."""
    for i, one in enumerate(body.tools or ()):
        only(f"tools[{i}].type", one.get("type"), ("custom",))
    tools = messages.tools_of([{"type": "function", "function": {
        "name": one.get("name"), "description": one.get("description"), "parameters": one.get("input_schema")}}
        for one in body.tools or ()], "name", "input_schema")
    given = body.tool_choice or {}
    kind = given.get("type", "auto" if tools else "none")
    only("tool_choice.type", kind, ("auto", "any", "tool", "none"))
    choice = messages.choice_of({"any": "required"}.get(kind, kind) if kind != "tool" else {"name": given.get("name")},
                                tools)
    return tools, choice, not given.get("disable_parallel_tool_use")


def _messages(given: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield messages as templates take them, with their places: results of calls are messages of their own."""
    for i, one in enumerate(given):
        where = f"messages[{i}]"
        content, role = one.get("content"), one.get("role")
        if not isinstance(content, list):
            yield where, {"role": role, "content": content}
            continue
        texts, calls, thinking = list[dict[str, Any]](), list[dict[str, Any]](), ""
        for block in content:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_use":
                calls.append({"id": block.get("id", ""),
                              "function": {"name": block.get("name"), "arguments": block.get("input") or {}}})
            elif kind == "tool_result":
                inner = block.get("content") or ""
                yield where, {"role": "tool", "tool_call_id": block.get("tool_use_id"),
                              "content": messages.text_of(inner, f"{where}.content")}
            elif kind == "thinking":
                thinking += str(block.get("thinking") or "")
            elif kind != "redacted_thinking":
                texts.append(block)
        if texts or calls:
            made: dict[str, Any] = {"role": role, "content": messages.text_of(texts, f"{where}.content")}
            if calls:
                made["tool_calls"] = calls
            if thinking:
                made["reasoning_content"] = thinking
            yield where, made


def _blocks(parts: Iterable[Event]) -> list[dict[str, Any]]:
    """Return a whole answer as blocks."""
    made = message_of(parts)
    blocks: list[dict[str, Any]] = []
    if made.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": made["reasoning_content"], "signature": THINKING_SIGNATURE})
    if made["content"]:
        blocks.append({"type": "text", "text": made["content"]})
    return blocks + [{"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": given}
                     for one in made.get("tool_calls", ()) if (given := messages.called_with(one)) is not None]


def _stopped(reason: str, talk: Conversation) -> dict[str, Any]:
    found = talk.answer.completion.choices[0].stop_string
    return {"stop_reason": REASONS.get(reason, "end_turn") if found is None else "stop_sequence",
            "stop_sequence": found}


def _usage(done: Completion) -> dict[str, Any]:
    return {"input_tokens": done.prompt_tokens - done.cached_tokens, "cache_read_input_tokens": done.cached_tokens,
            "cache_creation_input_tokens": 0, "output_tokens": done.completion_tokens}


class _Stream:
    """The events of an answer."""

    def __init__(self, head: dict[str, Any]):
        self._head = head
        self._index, self._kind = -1, ""

    async def events(self, talk: Conversation) -> AsyncIterator[bytes]:
        """Yield all events."""
        usage = {"input_tokens": len(talk.answer.prompt_ids), "output_tokens": 0}
        yield self._event("message_start", message={**self._head, "content": [], "stop_reason": None,
                                                    "stop_sequence": None, "usage": usage})
        reason = ""
        async for pieces in talk.pieces():
            yield b"".join(one for piece in pieces for part in piece.parts for one in self._take(part)) or ALIVE
            reason = pieces[-1].finish_reason if pieces else ""
        yield b"".join(self._close())
        yield self._event("message_delta", delta=_stopped(reason, talk), usage=_usage(talk.answer.completion))
        yield self._event("message_stop")

    def _take(self, part: Event) -> Iterable[bytes]:
        if isinstance(part, CallStart):
            yield from self._open("tool_use", {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        elif isinstance(part, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Content):
            if self._kind != "text":
                yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        elif isinstance(part, Reasoning):
            if self._kind != "thinking":
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": THINKING_SIGNATURE})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close()
        self._index, self._kind = self._index + 1, kind
        yield self._event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterable[bytes]:
        if self._kind:
            self._kind = ""
            yield self._event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    @staticmethod
    def _event(name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields}, name)


async def count_tokens(call: Call) -> Reply:
    """Return how many tokens a conversation has."""
    body = call.read(Counted)
    asked = _asked(body, {}, None)
    async with call.server.models.using(body.model) as served:
        shown = messages.template_tools(asked.tools)
        ids = await in_thread(lambda: served.model.chat_ids(asked.messages, shown, **asked.template))
    return Reply({"input_tokens": len(ids)})
