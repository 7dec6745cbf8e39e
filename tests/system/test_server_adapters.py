"""ollama's and Anthropic's APIs over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
from tests.helpers.serving import Running, chat_model, serving

HELLO = [{"role": "user", "content": "Tell me a tale."}]
PARAMETERS = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["days"], "additionalProperties": False}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving({"chat": chat_model(tmp_path_factory.mktemp("chat"))}) as one:
        yield one


# -- ollama ------------------------------------------------------------------------------------------------------------


def lines(body: bytes) -> list[Any]:
    return [json.loads(line) for line in body.splitlines()]


def test_ollamas_chat(running: Running) -> None:
    want = running.llm().chat(HELLO, temperature=0, max_tokens=12)
    asked = {"model": "chat:latest", "messages": HELLO, "options": {"temperature": 0, "num_predict": 12, "num_ctx": 99}}
    whole = running.ask("/api/chat", {**asked, "stream": False}).json
    assert whole["message"] == {"role": "assistant", "content": want} and whole["done_reason"] == "length"
    assert whole["eval_count"] == 12 and whole["done"] is True
    *found, last = lines(running.ask("/api/chat", asked).body)
    assert "".join(one["message"]["content"] for one in found) == want and not any(one["done"] for one in found)
    assert last["done"] and last["prompt_eval_count"] == whole["prompt_eval_count"]


def test_ollamas_generate(running: Running) -> None:
    options = {"temperature": 0, "num_predict": 10}
    want = running.llm().generate("Once upon a time", temperature=0, max_tokens=10)
    asked = {"model": "chat", "prompt": "Once upon a time", "raw": True, "options": options}
    assert "".join(one["response"] for one in lines(running.ask("/api/generate", asked).body)) == want
    chatted = running.ask("/api/generate", {**asked, "raw": False, "system": "Be brief.", "stream": False}).json
    assert chatted["response"] == running.llm().chat([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once upon a time"}],
        temperature=0, max_tokens=10)
    formed = running.ask("/api/generate", {"model": "chat", "prompt": "Once", "raw": True, "format": PARAMETERS,
                                           "stream": False}).json["response"]
    assert 1 <= json.loads(formed)["days"] <= 9
    assert running.ask("/api/generate", {"model": "chat"}).json["done_reason"] == "load"


def test_ollamas_models(running: Running) -> None:
    assert running.ask("/api/tags").json["models"][0]["name"] == "chat:latest"
    shown = running.ask("/api/show", {"model": "chat"}).json
    assert shown["capabilities"] == ["completion", "tools"] and shown["model_info"]["llama.context_length"] == 512
    assert running.ask("/api/ps").json["models"][0]["size"] and running.ask("/api/version").json["version"]
    assert len(running.ask("/api/embed", {"model": "chat", "input": ["a", "b"]}).json["embeddings"]) == 2
    text = "fox " * 2000
    (cut,) = running.ask("/api/embed", {"model": "chat", "input": text}).json["embeddings"]
    (want,) = running.llm().embed([running.llm().tokenizer.encode(text)[:512]])
    assert cut == want.tolist()


# -- Anthropic ---------------------------------------------------------------------------------------------------------


def test_messages(running: Running) -> None:
    want = running.llm().chat([{"role": "system", "content": "Be brief."}, *HELLO], temperature=0, max_tokens=12)
    asked = {"model": "chat", "max_tokens": 12, "temperature": 0, "system": "Be brief.", "messages": HELLO}
    whole = running.ask("/v1/messages", asked).json
    assert whole["content"] == [{"type": "text", "text": want}] and whole["stop_reason"] == "max_tokens"
    events = running.ask("/v1/messages", {**asked, "stream": True}).events
    kinds = [one["type"] for one in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta") == want
    counted = running.ask("/v1/messages/count_tokens", {name: asked[name] for name in ("model", "system", "messages")})
    usage = whole["usage"]
    assert counted.json["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_stop_sequence_is_named(running: Running) -> None:
    asked = {"model": "chat", "max_tokens": 40, "temperature": 0, "messages": HELLO, "stop_sequences": ["xyz", "e"]}
    found = running.ask("/v1/messages", asked).json
    assert found["stop_reason"] == "stop_sequence" and found["stop_sequence"] == "e"
    (delta,) = [one["delta"] for one in running.ask("/v1/messages", {**asked, "stream": True}).events
                if one["type"] == "message_delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "e"}


def test_tool_use(running: Running) -> None:
    asked = {"model": "chat", "max_tokens": 200, "messages": HELLO, "tool_choice": {
        "type": "any", "disable_parallel_tool_use": True}, "tools": [
        {"name": "weather", "description": "Of a place.", "input_schema": PARAMETERS}]}
    found = running.ask("/v1/messages", asked).json
    used = found["content"][-1]
    assert used["type"] == "tool_use" and 1 <= used["input"]["days"] <= 9 and found["stop_reason"] == "tool_use"
    events = running.ask("/v1/messages", {**asked, "stream": True}).events
    parts = [one["delta"]["partial_json"] for one in events if one["type"] == "content_block_delta"
             and one["delta"]["type"] == "input_json_delta"]
    assert 1 <= json.loads("".join(parts))["days"] <= 9
    cut = running.ask("/v1/messages", {**asked, "max_tokens": 12}).json  # within the arguments
    assert cut["stop_reason"] == "max_tokens" and not [one for one in cut["content"] if one["type"] == "tool_use"]
    answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used["id"], "content": "Rain."}]}
    again = {**asked, "tool_choice": {"type": "none"}, "max_tokens": 4,
             "messages": [*HELLO, {"role": "assistant", "content": found["content"]}, answer]}
    assert running.ask("/v1/messages", again).status == 200


def test_output_config(running: Running) -> None:
    schema = {"type": "object", "properties": {"old": {"type": "boolean"}}, "required": ["old"],
              "additionalProperties": False}
    found = running.ask("/v1/messages", {
        "model": "chat", "max_tokens": 60, "messages": HELLO, "temperature": 0, "output_config": {
            "effort": "low", "format": {"type": "json_schema", "schema": schema}}}).json
    assert set(json.loads(found["content"][0]["text"])) == {"old"}
