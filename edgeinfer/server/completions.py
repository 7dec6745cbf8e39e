"""OpenAI's text completions: /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine import Completion, Delta, TokenLogprob, TopLogprob
from .answers import Answer, outcome
from .chat import DONE
from .conversation import finish_reason
from .errors import ApiError, openai_error
from .http import ALIVE, Call, Events, Reply, event, new_id
from .models import SHORT, Served, in_thread
from .sampling import check_ids, fitted, form_field, form_of, only, options_of, prompts_of, refuse
from .types import CompletionRequest

if TYPE_CHECKING:
    from ..engine import Request
    from ..llm import LLM
    from ..text import Tokenizer

DEFAULT_TOKENS = 16
"""Tokens of a completion where none are asked for, as OpenAI has it."""


@dataclass
class Prompted:
    """One prompt of a request."""

    answer: Answer | None
    """Answer to the prompt; None if nothing is to be generated."""
    echo: str
    """Text in front of the answer."""
    scored: list[TokenLogprob | None]
    """Log-probabilities of the prompt's tokens, of which the first has none."""
    n_prompt: int


async def complete(call: Call) -> Reply | Events:
    """Continue texts, whole or as a stream."""
    body = call.read(CompletionRequest)
    call.prompt_field, call.form_field = "prompt", form_field(body.regex, body.grammar)
    options, most = _options(body, call), call.server.config.max_samples
    prompts, n = prompts_of(body.prompt, "prompt", most), options.get("n", 1)
    if len(prompts) * n > most:
        raise ApiError(400, f"{len(prompts)} prompts with {n} samples each are requested; at most {most} texts are "
                            "allowed (--max-samples).", param="prompt")
    async with AsyncExitStack() as held:
        served = await held.enter_async_context(call.server.models.using(body.model))
        call.note["model"] = served.name
        begun = [await _begin(call, served, body, one, options, held) for one in prompts]
        head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()),
                "model": served.name}
        tokenizer = served.model.tokenizer
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return Events(_stream(begun, head, tokenizer, n, body, usage), lambda error: event(openai_error(error)),
                          held.pop_all())
        done = await asyncio.gather(*(one.answer.whole() for one in begun if one.answer))
        choices = [choice for i, one in enumerate(begun)
                   for choice in _choices(one, i * n, tokenizer, body, next(iter(done[i:]), None))]
        return Reply({**head, "choices": choices, "usage": _usage(begun)})


def _options(body: CompletionRequest, call: Call) -> dict[str, Any]:
    refuse({"suffix": body.suffix or None}, {"suffix": "models here continue a text"})
    only("best_of", body.best_of, (1, body.n or 1))
    only("service_tier", body.service_tier, ("auto", "default"))
    if body.logprobs is not None and not 0 <= body.logprobs <= 20:
        raise ApiError(400, f"logprobs is {body.logprobs}; it must be from 0 to 20.", param="logprobs")
    if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
        raise ApiError(400, f"max_tokens is {body.max_tokens}; it must be 1 or more, or 0 with echo.",
                       param="max_tokens")
    form = form_of(body.response_format, body.regex, body.grammar)
    return options_of(
        call.server.config, stop=body.stop, n=body.n, logit_bias=body.logit_bias, seed=body.seed,
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p,
        presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty, ignore_eos=body.ignore_eos, logprobs=body.logprobs,
        response_format=form)


async def _begin(call: Call, served: Served, body: CompletionRequest, prompt: str | list[int],
                 options: dict[str, Any], held: AsyncExitStack) -> Prompted:
    """Prepare one prompt, score it where its log-probabilities are asked for, and start its generation."""
    llm = served.model
    if not isinstance(prompt, str):
        check_ids(prompt, served, "prompt")
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens

    def prepare() -> tuple[list[int], str, Request[Completion] | None]:
        if isinstance(prompt, str):
            ids, text = llm.prompt_ids(prompt), prompt
        else:
            ids, text = prompt, llm.tokenizer.decode(prompt) if body.echo else ""
        chosen = fitted({**options, "reuse": True}, served, len(ids), most)
        return ids, text, llm.request(ids, chosen, salt=call.salt) if most else None

    short = len(prompt) <= SHORT and not body.echo and options.get("response_format") is None
    ids, text, request = await in_thread(prepare, short)
    scored = list[TokenLogprob | None]()
    if body.echo and body.logprobs is not None:
        scored = [None, *await _scores(llm, ids, body.logprobs)]
    answer = None
    if request is not None:
        answer = Answer(request, call)
        held.callback(answer.close)
        answer.start()
    return Prompted(answer, text if body.echo else "", scored, len(ids))


async def _scores(llm: LLM, ids: list[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of a prompt's tokens after the first one."""
    if len(ids) < 2:
        return []
    (score,) = await outcome(await in_thread(lambda: llm.score_request(ids[:1], [ids[1:]], top=top)))
    text, tops = llm.tokenizer.token_text, score.tops or ((),) * len(score.logprobs)
    return [TokenLogprob(token_id, text(token_id), logprob,
                         tuple(TopLogprob(other, text(other), value) for other, value in best))
            for token_id, logprob, best in zip(score.token_ids, score.logprobs, tops, strict=True)]


def _choices(one: Prompted, first: int, tokenizer: Tokenizer, body: CompletionRequest,
             done: Completion | None) -> list[dict[str, Any]]:
    """Return the choices of one prompt."""
    if done is None:
        return [_choice(first, one.echo, _logprobs(one.scored, tokenizer) if one.scored else None, "length")]
    return [_choice(first + each.index, one.echo + each.text, None if body.logprobs is None else _logprobs(
        [*one.scored, *(each.logprobs or ()), *([each.end] if each.end else [])], tokenizer),
        finish_reason(each.finish_reason)) for each in done.choices]


def _choice(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(found: Iterable[TokenLogprob | None], tokenizer: Tokenizer, offset: int = 0) -> dict[str, Any]:
    """Return log-probabilities as text completions have them; the first token of a prompt has none."""
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in found:
        text = one.text if one else ""
        made["tokens"].append(text)
        made["token_logprobs"].append(one.logprob if one else None)
        made["top_logprobs"].append({**{top.text: top.logprob for top in one.top}, text: one.logprob} if one else None)
        made["text_offset"].append(offset)
        offset += len(text)
    return made


async def _stream(begun: list[Prompted], head: dict[str, Any], tokenizer: Tokenizer, n: int, body: CompletionRequest,
                  usage: bool) -> AsyncIterator[bytes]:
    """Yield the chunks of all texts as they come."""
    chunk: dict[str, Any] = {**head, "usage": None} if usage else head
    for i, one in enumerate(begun):
        if one.echo or one.answer is None:
            reason = "length" if one.answer is None else None
            for index in range(i * n, i * n + n):
                yield event({**chunk, "choices": [_choice(
                    index, one.echo, _logprobs(one.scored, tokenizer) if one.scored else None, reason)]})
    async for i, deltas in _merged(begun):
        data = b""
        for each in deltas:
            found = [*each.logprobs, *([each.end] if each.end else [])]
            logprobs = _logprobs(found, tokenizer) if found else None
            data += event({**chunk, "choices": [_choice(i * n + each.number, each.text, logprobs,
                                                        finish_reason(each.finish_reason) or None)]})
        yield data or ALIVE
    if usage:
        yield event({**chunk, "choices": [], "usage": _usage(begun)})
    yield DONE


async def _merged(begun: list[Prompted]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Iterate over new parts of all prompts, in the order in which they come."""
    running = {i: one.answer.deltas() for i, one in enumerate(begun) if one.answer}
    if len(running) == 1:
        ((i, only_one),) = running.items()
        async for found in only_one:
            yield i, found
        return
    waiting = {asyncio.ensure_future(anext(each)): i for i, each in running.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                try:
                    found = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(running[i]))] = i
                yield i, found
    finally:
        for task in waiting:
            task.cancel()


def _usage(begun: list[Prompted]) -> dict[str, Any]:
    done = [one.answer.completion for one in begun if one.answer]
    prompt, new = sum(one.n_prompt for one in begun), sum(one.completion_tokens for one in done)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in done)}}
