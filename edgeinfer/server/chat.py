"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from ..engine import Completion, TokenLogprob
from . import messages
from .conversation import Asked, Conversation, Piece, begin
from .errors import ApiError, openai_error
from .http import ALIVE, Call, Events, Reply, event, new_id
from .sampling import at_least_one, form_field, form_of, only, options_of, refuse, template_of
from .tools import CallArguments, CallStart, Content, Event, Reasoning
from .types import ChatRequest

if TYPE_CHECKING:
    from ..text import Tokenizer
    from .settings import ServerConfig

DONE = b"data: [DONE]\n\n"
FUNCTIONS = "give tools and tool_choice instead"
REMEDIES = {"functions": FUNCTIONS, "function_call": FUNCTIONS, "audio": "models here read and write text"}


async def complete(call: Call) -> Reply | Events:
    """Answer a conversation, whole or as a stream."""
    body = call.read(ChatRequest)
    call.form_field = form_field(body.regex, body.grammar)
    asked = asked_of(body, call.server.config)
    async with AsyncExitStack() as held:
        served = await held.enter_async_context(call.server.models.using(body.model))
        talk = await begin(call, served, asked, held)
        head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": served.name,
                "system_fingerprint": None}
        tokenizer = served.model.tokenizer
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return Events(_stream(talk, head, tokenizer, asked.options.get("n", 1), usage),
                          lambda error: event(openai_error(error)), held.pop_all())
        pieces = await talk.whole()
        choices = [_choice(piece, tokenizer, body.logprobs) for piece in pieces]
        return Reply({**head, "object": "chat.completion", "choices": choices,
                      "usage": usage_of(talk.answer.completion)})


def asked_of(body: ChatRequest, config: ServerConfig) -> Asked:
    """Return the settings of a request; raises `ApiError` for fields that are wrong or not supported."""
    refuse({name: getattr(body, name) for name in ("functions", "function_call", "audio", "prediction",
                                                   "web_search_options", "verbosity")}, REMEDIES)
    only("modalities", body.modalities, (["text"],))
    only("store", body.store, (False,))
    only("service_tier", body.service_tier, ("auto", "default"))
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs; set it to true.", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise ApiError(400, f"top_logprobs is {body.top_logprobs}; it must be from 0 to 20.", param="top_logprobs")
    at_least_one("max_tokens", body.max_tokens)
    at_least_one("max_completion_tokens", body.max_completion_tokens)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = messages.tools_of(body.tools)
    return Asked(
        messages.template_messages(body.messages),
        options_of(config, stop=body.stop, n=body.n, logit_bias=body.logit_bias, seed=body.seed,
                   temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p,
                   presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
                   repetition_penalty=body.repetition_penalty, ignore_eos=body.ignore_eos,
                   logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        most, form_of(body.response_format, body.regex, body.grammar), tools,
        messages.choice_of(body.tool_choice, tools), body.parallel_tool_calls is not False,
        template_of(body.chat_template_kwargs, body.reasoning_effort))


async def _stream(talk: Conversation, head: dict[str, Any], tokenizer: Tokenizer, n: int,
                  usage: bool) -> AsyncIterator[bytes]:
    """Yield the chunks of all answers, the usage where it was asked for, and the end."""
    chunk = {**head, "object": "chat.completion.chunk"}
    if usage:
        chunk["usage"] = None
    for index in range(n):
        yield event({**chunk, "choices": [_delta(index, {"role": "assistant", "content": ""})]})
    async for pieces in talk.pieces():
        data = b""
        for piece in pieces:
            logprobs = logprobs_of(piece.logprobs, tokenizer) if piece.logprobs else None
            for delta in map(delta_of, piece.parts):
                data += event({**chunk, "choices": [_delta(piece.number, delta, logprobs=logprobs)]})
                logprobs = None  # the first part has those of all
            if logprobs:
                data += event({**chunk, "choices": [_delta(piece.number, {}, logprobs=logprobs)]})
            if piece.finish_reason:
                data += event({**chunk, "choices": [_delta(piece.number, {}, piece.finish_reason)]})
        yield data or ALIVE
    if usage:
        yield event({**chunk, "choices": [], "usage": usage_of(talk.answer.completion)})
    yield DONE


def _delta(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def delta_of(part: Event) -> dict[str, Any]:
    """Return a part of an answer as chunks have it."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, CallStart):
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function",
                                "function": {"name": part.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _choice(piece: Piece, tokenizer: Tokenizer, logprobs: bool | None) -> dict[str, Any]:
    return {"index": piece.number, "message": {"role": "assistant", **message_of(piece.parts)},
            "logprobs": logprobs_of(piece.logprobs, tokenizer) if logprobs else None,
            "finish_reason": piece.finish_reason}


def message_of(parts: Iterable[Event]) -> dict[str, Any]:
    """Return the parts of a whole answer as a message."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Reasoning):
            reasoning += part.text
        elif isinstance(part, CallStart):
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    made: dict[str, Any] = {"content": content if content or not calls else None, "refusal": None}
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = calls
    return made


def logprobs_of(found: Iterable[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return log-probabilities as chat completions have them."""
    def one(token_id: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(tokenizer.token_bytes(token_id))}

    return {"content": [{**one(each.token_id, each.text, each.logprob),
                         "top_logprobs": [one(*top) for top in each.top]} for each in found], "refusal": None}


def usage_of(done: Completion) -> dict[str, Any]:
    """Return the tokens of a request."""
    drafted = done.speculation
    return {"prompt_tokens": done.prompt_tokens, "completion_tokens": done.completion_tokens,
            "total_tokens": done.prompt_tokens + done.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": drafted.accepted if drafted else 0,
                "rejected_prediction_tokens": drafted.drafted - drafted.accepted if drafted else 0}}
