"""OpenAI's responses: /v1/responses, with text and function calls, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any

from ..engine import Completion
from . import messages
from .conversation import Asked, Conversation, begin
from .errors import ApiError, openai_error
from .http import ALIVE, Call, Events, Reply, event, new_id
from .sampling import at_least_one, form_of, only, options_of, refuse, template_of
from .tools import CallArguments, CallStart, Content, Event
from .types import ResponsesRequest

KEPT = "this server keeps no answers; send the whole conversation as input"
REMEDIES = {"previous_response_id": KEPT, "conversation": KEPT, "prompt": "send its text as instructions"}


async def respond(call: Call) -> Reply | Events:
    """Answer a conversation."""
    body = call.read(ResponsesRequest)
    call.prompt_field, call.form_field = "input", "text.format"
    asked = _asked(body, call)
    async with AsyncExitStack() as held:
        served = await held.enter_async_context(call.server.models.using(body.model))
        talk = await begin(call, served, asked, held)
        made = _Response(body, served.name)
        if body.stream:
            return Events(made.stream(talk), lambda error: event({"type": "error", **_error(error)}, "error"),
                          held.pop_all())
        (piece,) = await talk.whole()
        for part in piece.parts:
            made.take(part)
        return Reply(made.ended(piece.finish_reason, talk.answer.completion))


def _error(error: ApiError) -> Any:
    return openai_error(error)["error"]


def _asked(body: ResponsesRequest, call: Call) -> Asked:
    refuse({name: getattr(body, name) for name in ("previous_response_id", "conversation", "prompt", "max_tool_calls")},
           REMEDIES)
    only("background", body.background, (False,))
    only("truncation", body.truncation, ("disabled",))
    only("service_tier", body.service_tier, ("auto", "default"))
    only("top_logprobs", body.top_logprobs, (0,))
    only("text.verbosity", body.text and body.text.verbosity, ("medium",))
    for one in body.include or ():
        only("include", one, ("reasoning.encrypted_content",))
    at_least_one("max_output_tokens", body.max_output_tokens)
    given = [("input", {"role": "user", "content": body.input})] if isinstance(body.input, str) \
        else _messages(body.input)
    if not given:
        raise ApiError(400, "input is empty; give a text, or at least one item.", param="input")
    if body.instructions:
        given.insert(0, ("instructions", {"role": "system", "content": body.instructions}))
    tools = messages.tools_of(body.tools)
    places, found = zip(*given, strict=True)
    return Asked(messages.template_messages(found, places),
                 options_of(call.server.config, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k,
                            min_p=body.min_p, seed=body.seed),
                 body.max_output_tokens, form_of(body.text.format if body.text else None, name="text.format"), tools,
                 messages.choice_of(body.tool_choice, tools), body.parallel_tool_calls is not False,
                 template_of(body.chat_template_kwargs, body.reasoning.effort if body.reasoning else None))


def _messages(items: Iterable[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return input items as messages, with their places: calls belong to the assistant's message before them."""
    made: list[tuple[str, dict[str, Any]]] = []
    for i, one in enumerate(items):
        where = f"input[{i}]"
        kind = one.get("type", "message")
        if kind == "message":
            made.append((where, {"role": one.get("role"), "content": one.get("content")}))
        elif kind == "function_call":
            if not (made and made[-1][1]["role"] == "assistant"):
                made.append((where, {"role": "assistant", "content": ""}))
            function = {"name": one.get("name"), "arguments": one.get("arguments")}
            made[-1][1].setdefault("tool_calls", []).append({"id": one.get("call_id", ""), "function": function})
        elif kind == "function_call_output":
            made.append((where, {"role": "tool", "tool_call_id": one.get("call_id"), "content": one.get("output")}))
        elif kind != "reasoning":  # which models do not read again
            raise ApiError(400, f"{where}.type is {str(kind)[:40]!r}; this server reads message, function_call, "
                                "function_call_output and reasoning.", param=f"{where}.type")
    return made


class _Response:
    """A response while it grows: its items, and the events that tell of them."""

    def __init__(self, body: ResponsesRequest, model: str):
        self._number = -1
        self._head: dict[str, Any] = {
            "id": new_id("resp_"), "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "model": model, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False, "temperature": body.temperature,
            "top_p": body.top_p, "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "text": body.text or {"format": {"type": "text"}}, "metadata": body.metadata or {}, "store": False,
            "previous_response_id": None, "reasoning": body.reasoning, "truncation": "disabled", "usage": None}
        self._items: list[dict[str, Any]] = []

    def take(self, part: Event) -> list[bytes]:
        """Append a part of the answer; returns its events."""
        if isinstance(part, CallStart):
            return [*self._close(), self._open({
                "type": "function_call", "id": new_id("fc_"), "call_id": part.id, "name": part.name,
                "arguments": "", "status": "in_progress"})]
        if isinstance(part, CallArguments):
            self._items[-1]["arguments"] += part.text
            return [self._event("response.function_call_arguments.delta", **self._where(), delta=part.text)]
        kind = "message" if isinstance(part, Content) else "reasoning"
        events = []
        if not self._items or self._items[-1]["type"] != kind or self._items[-1].get("status") == "completed":
            events = [*self._close(), *self._open_text(kind)]
        item = self._items[-1]
        item["content"][0]["text"] += part.text
        where = {**self._where(), "content_index": 0, "delta": part.text}
        return [*events, self._event("response.output_text.delta", **where, logprobs=[]) if kind == "message"
                else self._event("response.reasoning_text.delta", **where)]

    def _open(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _open_text(self, kind: str) -> Iterable[bytes]:
        reasoning = kind == "reasoning"
        item: dict[str, Any] = {"type": kind, "id": new_id("rs_" if reasoning else "msg_"),
                                "status": "in_progress", "content": []}
        if reasoning:
            item["summary"] = []
        else:
            item["role"] = "assistant"
        yield self._open(item)
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""} if reasoning else {
            "type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        if not reasoning:
            yield self._event("response.content_part.added", **self._where(), content_index=0, part=part)

    def _close(self) -> Iterable[bytes]:
        """Yield the events that end the last item, unless it has ended."""
        if not self._items or self._items[-1].get("status") == "completed":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", **self._where(), name=item["name"],
                              arguments=item["arguments"])
        elif item["type"] == "message":
            part = item["content"][0]
            yield self._event("response.output_text.done", **self._where(), content_index=0, text=part["text"],
                              logprobs=[])
            yield self._event("response.content_part.done", **self._where(), content_index=0, part=part)
        else:
            yield self._event("response.reasoning_text.done", **self._where(), content_index=0,
                              text=item["content"][0]["text"])
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    async def stream(self, talk: Conversation) -> AsyncIterator[bytes]:
        """Yield all events."""
        yield self._event("response.created", response={**self._head, "output": []})
        yield self._event("response.in_progress", response={**self._head, "output": []})
        reason = ""
        async for pieces in talk.pieces():
            yield b"".join(one for piece in pieces for part in piece.parts for one in self.take(part)) or ALIVE
            reason = pieces[-1].finish_reason if pieces else ""
        yield b"".join(self._close())
        whole = self.ended(reason, talk.answer.completion)
        yield self._event(f"response.{whole['status']}", response=whole)

    def ended(self, reason: str, done: Completion) -> dict[str, Any]:
        """Return the whole response."""
        for _ in self._close():
            pass
        cut = reason == "length"
        self._head["usage"] = {
            "input_tokens": done.prompt_tokens, "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": done.prompt_tokens + done.completion_tokens}
        self._head["status"] = "incomplete" if cut else "completed"
        self._head["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return {**self._head, "output": self._items}
