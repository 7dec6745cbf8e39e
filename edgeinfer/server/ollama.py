"""ollama's API: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from datetime import datetime, timezone
from typing import Any

from .. import __version__
from ..base.process import printable
from ..engine import Completion
from . import messages
from .answers import Answer
from .chat import message_of
from .conversation import Asked, Conversation, begin, finish_reason
from .embeddings import MAX_TEXTS, embedded
from .errors import ApiError, ollama_error
from .http import NDJSON, Call, Events, Reply, encode
from .models import LATEST, Served, in_thread
from .ollama_types import ChatBody, EmbedBody, GenerateBody, Generating, ShowBody
from .sampling import fitted, form_of, only, options_of, prompts_of, refuse, renamed
from .tools import CallArguments, CallStart

NAMES = {"repeat_penalty": "repetition_penalty"}
"""Names of ollama's options that have another name here."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "presence_penalty",
            "frequency_penalty", "num_predict")
OPENING = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "num_keep", "repeat_last_n",
           "typical_p", "numa", "low_vram", "vocab_only", "use_mlock", "penalize_newline", "tfs_z", "mirostat",
           "mirostat_eta", "mirostat_tau", "f16_kv")
"""Options of opening a model, which was opened already, and of samplers that are not here; a server of ollama's accepts
them for every model, too."""


def _options(call: Call, given: Mapping[str, Any] | None) -> tuple[dict[str, Any], int | None]:
    """Return the options of a request, and how many tokens it may give; None is all that there is room for."""
    values = dict(given or {})
    for name in values:
        if name not in SAMPLING and name not in OPENING:
            raise ApiError(400, f"options.{printable(name[:60])} is not an option of this server; omit it.")
    most = values.get("num_predict")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
        raise ApiError(400, f"options.num_predict is {str(most)[:40]!r}; it must be a whole number.")
    asked = {NAMES.get(name, name): values[name] for name in SAMPLING[:-1] if values.get(name) is not None}
    stop = asked.get("stop", [])
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(one, str) for one in stop)):
        raise ApiError(400, "options.stop must be a text, or a list of texts.")
    if not isinstance(asked.get("seed", 0), int):
        raise ApiError(400, "options.seed must be a whole number.")
    try:
        found = options_of(call.server.config, **asked)
    except ApiError as error:
        ours = {ours: given for given, ours in NAMES.items()}
        raise renamed(error, f"options.{ours.get(str(error.param), error.param)}") from None
    return found, most if most is not None and most > 0 else None


def _form(given: str | dict[str, Any] | None) -> Any:
    if given in (None, ""):
        return None
    if given == "json":
        return form_of({"type": "json_object"})
    if isinstance(given, str):
        raise ApiError(400, f"format is {given[:40]!r}; it must be 'json' or a JSON schema.")
    return form_of({"type": "json_schema", "json_schema": {"schema": given}})


async def chat(call: Call) -> Reply | Events:
    """Answer a conversation."""
    call.form_field = "format"
    body = call.read(ChatBody)
    _refuse_logprobs(body)
    if not body.messages:
        return await _loaded(call, body, {"message": {"role": "assistant", "content": ""}})
    given = [_message(i, one) for i, one in enumerate(body.messages)]
    tools = messages.tools_of(body.tools)
    options, most = _options(call, body.options)
    asked = Asked(messages.template_messages(given), options, most, _form(body.format), tools,
                  "auto" if tools else "none", template=_thinking(body.think))
    return await _answered(call, body, asked, "message")


def _message(i: int, one: dict[str, Any]) -> dict[str, Any]:
    if one.get("images"):
        raise ApiError(400, f"messages[{i}] has images; this server's models read text alone.")
    made = {**one, "content": one.get("content") or ""}
    if one.get("role") == "tool" and "tool_name" in one:
        made["name"] = one["tool_name"]
    if "thinking" in one:
        made["reasoning_content"] = one["thinking"]
    return made


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {} if think is None else {"enable_thinking": think}


async def generate(call: Call) -> Reply | Events:
    """Continue a text, or answer it as a message where the model has a chat template."""
    call.prompt_field, call.form_field = "prompt", "format"
    body = call.read(GenerateBody)
    _refuse_logprobs(body)
    refuse({name: getattr(body, name) or None for name in ("suffix", "template", "images", "context")}, {})
    if not body.prompt:
        return await _loaded(call, body, {"response": ""})
    options, most = _options(call, body.options)
    async with call.server.models.using(body.model) as served:
        chats = served.format is not None and not body.raw
    if chats:
        given = [{"role": "system", "content": body.system}] if body.system else []
        asked = Asked([*given, {"role": "user", "content": body.prompt}], options, most, _form(body.format),
                      template=_thinking(body.think))
        return await _answered(call, body, asked, "response")
    return await _continued(call, body, options, most)


def _refuse_logprobs(body: Generating) -> None:
    refuse({"logprobs": body.logprobs or None, "top_logprobs": body.top_logprobs or None},
           dict.fromkeys(("logprobs", "top_logprobs"), "OpenAI's API at /v1 has them"))


async def _loaded(call: Call, body: Generating, field: dict[str, Any]) -> Reply:
    """Answer a request without text, which asks for the model to be opened."""
    async with call.server.models.using(body.model) as served:
        return Reply({"model": served.name, "created_at": _now(), **field, "done": True, "done_reason": "load"})


async def _answered(call: Call, body: Generating, asked: Asked, field: str) -> Reply | Events:
    began = time.perf_counter()
    async with AsyncExitStack() as held:
        served = await held.enter_async_context(call.server.models.using(body.model))
        talk = await begin(call, served, asked, held)
        if body.stream:
            return Events(_stream(talk, served, field, began), lambda error: encode(ollama_error(error)) + b"\n",
                          held.pop_all(), NDJSON)
        (piece,) = await talk.whole()
        return Reply({"model": served.name, "created_at": _now(), **_field(field, message_of(piece.parts)),
                      **_end(piece.finish_reason, talk.answer.completion, began)})


def _field(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as ollama has it, where the arguments of calls are objects."""
    content = message.get("content") or ""
    thinking = {"thinking": message["reasoning_content"]} if message.get("reasoning_content") else {}
    if field == "response":
        return {"response": content, **thinking}
    made = {"role": "assistant", "content": content, **thinking}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [{"function": {"name": one["function"]["name"], "arguments": arguments}}
                              for one in calls if (arguments := messages.called_with(one)) is not None]
    return {"message": made}


async def _stream(talk: Conversation, served: Served, field: str, began: float) -> AsyncIterator[bytes]:
    calls: list[Any] = []
    reason = ""
    async for pieces in talk.pieces():
        for piece in pieces:
            calls += [one for one in piece.parts if isinstance(one, (CallStart, CallArguments))]
            shown = [one for one in piece.parts if not isinstance(one, (CallStart, CallArguments))]
            if shown:
                yield _line(served, _field(field, message_of(shown)), {"done": False})
            reason = piece.finish_reason
    if calls:
        yield _line(served, _field(field, message_of(calls)), {"done": False})
    yield _line(served, _field(field, {}), _end(reason, talk.answer.completion, began))


def _line(served: Served, field: Mapping[str, Any], rest: Mapping[str, Any]) -> bytes:
    return encode({"model": served.name, "created_at": _now(), **field, **rest}) + b"\n"


def _end(reason: str, done: Completion, began: float) -> dict[str, Any]:
    total = int(1e9 * (time.perf_counter() - began))
    first = int(1e6 * (done.ttft_ms or 0))
    return {"done": True, "done_reason": "length" if reason == "length" else "stop", "total_duration": total,
            "load_duration": 0, "prompt_eval_count": done.prompt_tokens, "prompt_eval_duration": first,
            "eval_count": done.completion_tokens, "eval_duration": max(total - first, 0)}


async def _continued(call: Call, body: GenerateBody, options: dict[str, Any], most: int | None) -> Reply | Events:
    """Continue a text as it is."""
    began = time.perf_counter()
    if (form := _form(body.format)) is not None:
        options["response_format"] = form
    async with AsyncExitStack() as held:
        served = await held.enter_async_context(call.server.models.using(body.model))
        llm = served.model

        def prepare() -> Any:
            ids = llm.prompt_ids(body.prompt)
            return llm.request(ids, fitted({**options, "reuse": True}, served, len(ids), most), salt=call.salt)

        call.note["model"] = served.name
        answer = Answer(await in_thread(prepare), call)
        held.callback(answer.close)
        answer.start()
        if body.stream:
            return Events(_texts(answer, served, began), lambda error: encode(ollama_error(error)) + b"\n",
                          held.pop_all(), NDJSON)
        done = await answer.whole()
        return Reply({"model": served.name, "created_at": _now(), "response": done.text,
                      **_end(finish_reason(done.finish_reason), done, began)})


async def _texts(answer: Answer, served: Served, began: float) -> AsyncIterator[bytes]:
    async for deltas in answer.deltas():
        for one in deltas:
            if one.text:
                yield _line(served, {"response": one.text}, {"done": False})
    done = answer.completion
    yield _line(served, {"response": ""}, _end(finish_reason(done.finish_reason), done, began))


async def embed(call: Call) -> Reply:
    """Return the embeddings of texts."""
    call.prompt_field = "input"
    body = call.read(EmbedBody)
    _options(call, body.options)
    texts: list[Any] = prompts_of(body.input, "input", MAX_TEXTS)
    async with call.server.models.using(body.model) as served:
        began, llm = time.perf_counter(), served.model
        only("dimensions", body.dimensions, (llm.runner.model.hidden_size,))
        if body.truncate is not False:
            texts = await in_thread(lambda: [llm.tokenizer.encode(one[:llm.most_prompt_bytes])[:served.room]
                                             for one in texts])
        rows, n_tokens = await embedded(call, served, texts, "mean")
        return Reply({"model": served.name, "embeddings": [row.tolist() for row in rows], "load_duration": 0,
                      "total_duration": int(1e9 * (time.perf_counter() - began)), "prompt_eval_count": n_tokens})


async def tags(call: Call) -> Reply:
    """Return the models that requests may name."""
    return Reply({"models": [_about(one) for one in call.server.models.all.values()]})


def _about(one: Served) -> dict[str, Any]:
    name = one.name if ":" in one.name else one.name + LATEST
    size = one.model.plan.total_bytes if one.llm else 0
    return {"name": name, "model": name, "modified_at": _now(one.opened), "size": size, "digest": "",
            "details": _details(one)}


def _details(one: Served) -> dict[str, Any]:
    family = one.model.runner.model.model_type if one.llm else ""
    return {"parent_model": "", "format": "edgeinfer", "family": family, "families": [family] if family else [],
            "parameter_size": "", "quantization_level": ""}


async def show(call: Call) -> Reply:
    """Return the description of a model."""
    body = call.read(ShowBody)
    async with call.server.models.using(body.model or body.name) as served:
        config, template = served.model.runner.model, served.model.chat_template
        source = template.source_text if template else ""
        family = config.model_type
        capabilities = ["completion", *(["tools"] if "tools" in source else []),
                        *(["thinking"] if served.format and served.format.reasons else [])]
        return Reply({"modelfile": "", "parameters": "", "template": source, "details": _details(served),
                      "model_info": {"general.architecture": family, f"{family}.context_length": served.room,
                                     f"{family}.embedding_length": config.hidden_size,
                                     f"{family}.block_count": config.num_hidden_layers},
                      "capabilities": capabilities, "modified_at": _now(served.opened)})


async def running(call: Call) -> Reply:
    """Return the models that are open."""
    return Reply({"models": [{**_about(one), "expires_at": _now(time.time() + 3600), "size_vram": 0,
                              "context_length": one.room} for one in call.server.models.open_models()]})


async def version(call: Call) -> Reply:
    """Return the version of edgeinfer."""
    return Reply({"version": __version__})


def _now(seconds: float | None = None) -> str:
    moment = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(moment, timezone.utc).isoformat().replace("+00:00", "Z")
