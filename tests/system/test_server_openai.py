"""OpenAI's API over HTTP: the texts of the engine, whole and streamed, and refusals that name the field."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
from edgeinfer import LLM
from tests.helpers.serving import Running, chat_model, serving, until
from tests.kernel_selection import everything

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Tell me a tale."}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 20}, "days": {
        "type": "integer", "minimum": 1, "maximum": 9}}, "required": ["place", "days"], "additionalProperties": False}}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("chat")
    with serving({"chat": chat_model(folder)}, keep_alive_seconds=3600.0) as one:
        yield one


# -- completions -------------------------------------------------------------------------------------------------------


def test_completions_are_those_of_the_model(running: Running) -> None:
    want = running.llm().complete(PROMPT, temperature=0, max_tokens=24)
    found = running.ask(COMPLETIONS, GREEDY).json
    assert found["choices"] == [{"index": 0, "text": want.text, "logprobs": None, "finish_reason": "length"}]
    assert found["object"] == "text_completion" and found["model"] == "chat"
    assert found["usage"]["prompt_tokens"] == want.prompt_tokens and found["usage"]["completion_tokens"] == 24
    ids = running.llm().tokenizer.encode(PROMPT)
    assert running.ask(COMPLETIONS, {**GREEDY, "prompt": ids}).json["choices"][0]["text"] == want.text


def test_streams_have_the_same_texts(running: Running) -> None:
    asked = {**GREEDY, "temperature": 0.9, "seed": 7, "n": 3, "logprobs": 2}
    whole = running.ask(COMPLETIONS, asked).json
    found = running.ask(COMPLETIONS, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    assert found.headers["content-type"].startswith("text/event-stream") and found.body.endswith(b"data: [DONE]\n\n")
    *chunks, last = found.events
    for want in whole["choices"]:
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == want["index"]]
        assert "".join(one["text"] for one in own) == want["text"]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [want["finish_reason"]]
        logprobs = [value for one in own if one["logprobs"] for value in one["logprobs"]["token_logprobs"]]
        assert logprobs == want["logprobs"]["token_logprobs"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_several_prompts_in_one_request(running: Running) -> None:
    prompts = [PROMPT, "The fox"]
    alone = [running.ask(COMPLETIONS, {**GREEDY, "prompt": one}).json["choices"][0]["text"] for one in prompts]
    found = running.ask(COMPLETIONS, {**GREEDY, "prompt": prompts, "n": 2}).json["choices"]
    assert [one["text"] for one in found] == [alone[0]] * 2 + [alone[1]] * 2
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    assert until(lambda: json.loads(running.log[-1]).get("completion_tokens") == 2 * 2 * 24)  # of all prompts
    events = running.ask(COMPLETIONS, {**GREEDY, "prompt": prompts, "stream": True}).events
    for i, want in enumerate(alone):
        assert "".join(one["choices"][0]["text"] for one in events if one["choices"][0]["index"] == i) == want


def test_echo_scores_the_prompt(running: Running) -> None:
    llm = running.llm()
    ids = llm.tokenizer.encode(PROMPT)
    (score,) = llm.score(ids[:1], [ids[1:]])
    found = running.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}).json
    (choice,) = found["choices"]
    assert choice["text"] == PROMPT and choice["logprobs"]["token_logprobs"] == [None, *score.logprobs]
    for token, logprob, top in zip(*(choice["logprobs"][name][1:] for name in ("tokens", "token_logprobs",
                                                                               "top_logprobs")), strict=True):
        assert top[token] == logprob <= max(top.values())
    both = running.ask(COMPLETIONS, {**GREEDY, "max_tokens": 3, "echo": True, "logprobs": 0}).json["choices"][0]
    assert both["text"].startswith(PROMPT) and len(both["logprobs"]["tokens"]) == len(ids) + 3


def test_requests_together_have_the_texts_of_each_alone(running: Running) -> None:
    bodies = [{**GREEDY, "prompt": f"{PROMPT} there was a {name}", "seed": i, "temperature": 0.8 * (i % 2),
               "stream": bool(i % 3), "presence_penalty": 0.3 * (i % 2)}
              for i, name in enumerate(("king", "fox", "crow", "wolf", "bird", "girl", "boy", "tree") * 3)]

    def text(body: dict[str, Any]) -> str:
        found = running.ask(COMPLETIONS, body)
        parts = found.events if body["stream"] else [found.json]
        return "".join(one["choices"][0]["text"] for one in parts)

    alone = [text(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(text, bodies)) == alone
    assert until(running.free)


def random_body(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a request of any kind."""
    chance = random.Random(number)
    beginning = "The king and the queen lived in a castle by the sea. " * chance.choice((0, 1, 4, 20))
    prompt = f"{beginning}Tale {number % 9}:"
    body: dict[str, Any] = {
        "temperature": chance.choice((0, 0.9)), "seed": number, "max_tokens": chance.choice((1, 8, 60, 200)),
        "frequency_penalty": chance.choice((0, 0.5)), "n": chance.choice((1, 1, 1, 2)), "stream": chance.random() < 0.5}
    if chance.random() < 0.2:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": TOOL["function"]["parameters"]}}
    if chance.random() < 0.4:
        if chance.random() < 0.3:
            body |= {"tools": [TOOL], "tool_choice": "required"}
            body.pop("response_format", None)
        return CHAT, {**body, "messages": [{"role": "user", "content": prompt}]}
    return COMPLETIONS, {**body, "prompt": prompt, "logprobs": chance.choice((None, 2))}


def answer(running: Running, path: str, body: dict[str, Any]) -> dict[int, Any]:
    """Return text, arguments of calls, log-probabilities and end of each sample, streamed or not."""
    found = running.ask(path, {name: value for name, value in body.items() if value is not None})
    assert found.status == 200, found.body
    made: dict[int, Any] = {}
    for choice in (each for one in (found.events if body["stream"] else [found.json]) for each in one["choices"]):
        own = made.setdefault(choice["index"], ["", "", [], None])
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        own[0] += part.get("content") or ""
        own[1] += "".join(call["function"]["arguments"] for call in part.get("tool_calls") or ())
        own[2] += (choice.get("logprobs") or {}).get("token_logprobs") or []
        own[3] = choice["finish_reason"] or own[3]
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_requests_of_all_kinds_together_have_the_answers_of_each_alone(tmp_path: Path) -> None:
    """200 with EDGEINFER_TEST_ALL=1; others have more sequences than the pool holds, too."""
    asked = [random_body(number) for number in range(200 if everything() else 80)]

    def opener(source: str, left: int | None) -> LLM:  # a pool in which requests are preempted
        return LLM(source, ctx=512, threads=2, max_sequences=8, kv_tokens=1024)

    with serving({"chat": chat_model(tmp_path)}, opener, max_requests=1000) as one, ThreadPoolExecutor(48) as pool:
        alone = [answer(one, *each) for each in asked]
        other_way = [(path, {**body, "stream": not body["stream"]}) for path, body in asked]
        random.Random(0).shuffle(order := list(range(len(asked))))
        together = dict(zip(order, pool.map(lambda i: answer(one, *other_way[i]), order), strict=True))
        assert [together[i] for i in range(len(asked))] == alone
        assert until(one.free) and one.llm().state().preemptions


def test_a_stop_string_and_a_form(running: Running) -> None:
    found = running.ask(COMPLETIONS, {**GREEDY, "stop": ["little"]}).json["choices"][0]
    assert found["finish_reason"] == "stop" and "little" not in found["text"]
    found = running.ask(COMPLETIONS, {**GREEDY, "regex": "[0-9]{3}-[0-9]{2}"}).json["choices"][0]
    assert found["finish_reason"] == "stop" and len(found["text"]) == 6
    banned = running.llm().tokenizer.encode(" there", add_bos=False)[0]
    assert "there" not in running.ask(COMPLETIONS, {**GREEDY, "logit_bias": {str(banned): -100}}).json[
        "choices"][0]["text"][:8]


def test_a_silent_stream_says_that_it_is_alive(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.server.answers.SILENCE_SECONDS", 1e-6)
    found = running.ask(COMPLETIONS, {**GREEDY, "prompt": "The king. " * 100, "stream": True})
    assert b": the answer is being computed\n\n" in found.body and found.events


def test_answers_have_the_room_that_there_is(running: Running) -> None:
    found = running.ask(COMPLETIONS, {**GREEDY, "max_tokens": 10 ** 6, "ignore_eos": True}).json
    assert found["usage"]["total_tokens"] == 512 and found["choices"][0]["finish_reason"] == "length"


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_answers_like_the_model(running: Running) -> None:
    want = running.llm().chat(HELLO, temperature=0, max_tokens=20)
    asked = {"messages": HELLO, "temperature": 0, "max_completion_tokens": 20}
    found = running.ask(CHAT, asked).json
    assert found["choices"][0]["message"] == {"role": "assistant", "content": want, "refusal": None}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a tale."}]}]
    assert running.ask(CHAT, {**asked, "messages": parts}).json["choices"][0]["message"]["content"] == want
    events = running.ask(CHAT, {**asked, "stream": True, "logprobs": True, "top_logprobs": 2}).events
    deltas = [one["choices"][0] for one in events]
    assert "".join(one["delta"].get("content") or "" for one in deltas) == want
    assert sum(len(one["logprobs"]["content"]) for one in deltas if one["logprobs"]) == 20
    assert deltas[0]["delta"]["role"] == "assistant" and deltas[-1]["finish_reason"] == "length"
    again = running.ask(CHAT, asked).json["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (again["prompt_tokens"] - 1) // 16 * 16


def test_json_follows_its_schema(running: Running) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
              "required": ["name", "old"], "additionalProperties": False}
    asked = {"messages": HELLO, "max_tokens": 100, "seed": 1, "response_format": {
        "type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}}
    made = json.loads(running.ask(CHAT, asked).json["choices"][0]["message"]["content"])
    assert set(made) == {"name", "old"} and isinstance(made["old"], bool)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_have_arguments_of_their_schema(running: Running, choice: Any) -> None:
    asked = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 120, "seed": 3,
             "parallel_tool_calls": False}
    (found,) = running.ask(CHAT, asked).json["choices"]
    (call,) = found["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert found["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather"
    assert isinstance(arguments["place"], str) and 1 <= arguments["days"] <= 9
    events = running.ask(CHAT, {**asked, "stream": True}).events
    calls = [each for one in events for each in one["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"].startswith("call_")
    assert json.loads("".join(one["function"]["arguments"] for one in calls)) == arguments
    messages = [*HELLO, found["message"], {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}]
    assert running.ask(CHAT, {"messages": messages, "tools": [TOOL], "max_tokens": 4}).status == 200


def test_responses(running: Running) -> None:
    want = running.llm().chat([{"role": "system", "content": "Be brief."}, *HELLO], temperature=0, max_tokens=12)
    asked = {"input": "Tell me a tale.", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 12}
    found = running.ask("/v1/responses", asked).json
    assert found["output"][0]["content"][0]["text"] == want and found["status"] == "incomplete"
    events = running.ask("/v1/responses", {**asked, "stream": True}).events
    kinds = [one["type"] for one in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    assert "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta") == want
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    called = running.ask("/v1/responses", {
        "input": HELLO, "tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required",
        "max_output_tokens": 120, "parallel_tool_calls": False}).json["output"]
    assert called[-1]["type"] == "function_call" and json.loads(called[-1]["arguments"])["days"]
    more = [*HELLO, called[-1], {"type": "function_call_output", "call_id": called[-1]["call_id"], "output": "Rain."}]
    assert running.ask("/v1/responses", {"input": more, "max_output_tokens": 4}).status == 200


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_embeddings_and_rankings(running: Running) -> None:
    texts = [PROMPT, "The fox"]
    want = running.llm().embed(texts)
    found = running.ask("/v1/embeddings", {"input": texts}).json["data"]
    assert np.array_equal(np.array([one["embedding"] for one in found], np.float32), want)
    packed = running.ask("/v1/embeddings", {"input": texts[0], "encoding_format": "base64"}).json["data"][0]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), want[0])


def test_tokens(running: Running) -> None:
    found = running.ask("/tokenize", {"content": PROMPT}).json
    assert found["tokens"] == running.llm().tokenizer.encode(PROMPT, add_bos=False) and found["count"]
    assert running.ask("/detokenize", {"tokens": found["tokens"]}).json["content"].strip() == PROMPT


def test_models_health_and_description(running: Running) -> None:
    assert running.ask("/health").json == {"status": "ok"}
    assert [one["id"] for one in running.ask("/v1/models").json["data"]] == ["chat"]
    assert running.ask("/v1/models/chat").json["id"] == "chat" and running.ask("/v1/models/other").status == 404
    described = running.ask("/openapi.json").json
    assert set(described["paths"]) >= {CHAT, COMPLETIONS, "/api/chat", "/v1/messages"}
    assert running.ask(COMPLETIONS, GREEDY).status == 200  # a model's counters begin with its first request
    metrics = running.ask("/metrics").body.decode()
    assert 'edgeinfer:generation_tokens_total{model_name="chat"}' in metrics
    assert "edgeinfer:resident_bytes" in metrics and running.ask("/status").json["ready"] is True


def test_completions_have_the_log_probability_of_the_end_token(running: Running) -> None:
    tokenizer = running.llm().tokenizer
    end = min(tokenizer.eos_ids)
    body = {"prompt": "Once upon a time", "logprobs": 1, "logit_bias": {str(end): 100.0}}
    (choice,) = running.ask(COMPLETIONS, body).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == [tokenizer.token_text(end)]
    assert len(choice["logprobs"]["token_logprobs"]) == 1
    events = running.ask(COMPLETIONS, {**body, "stream": True}).events
    assert [one["choices"][0]["logprobs"] for one in events] == [choice["logprobs"]]


def test_streamed_texts_have_their_log_probabilities(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "logprobs": True, "stream": True}
    chunks = [one["choices"][0] for one in running.ask(CHAT, body).events[1:]]
    assert all(one["logprobs"]["content"] for one in chunks if one["delta"].get("content"))


def test_json_objects_take_a_schema(running: Running) -> None:
    body = {"model": None, "prompt": "Hi", "response_format": {"type": "json_object", "schema": {"const": 42}}}
    assert json.loads(running.ask(COMPLETIONS, body).json["choices"][0]["text"]) == 42
