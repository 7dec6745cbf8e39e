"""Requests that are refused: each with its status and one sentence that names the field, in the object of its API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
from tests.helpers.serving import Running, chat_model, serving

GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Tell me a tale."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving({"chat": chat_model(tmp_path_factory.mktemp("chat"))}, keep_alive_seconds=3600.0) as one:
        yield one


def called(name: Any, parameters: Any = None) -> dict[str, Any]:
    """Return a conversation with a function that is to be called."""
    return {"messages": HELLO, "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": name, "parameters": parameters}}]}


def said(message: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation with an earlier answer."""
    return {"messages": [{"role": "assistant", **message}, *HELLO]}


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "not JSON": (CHAT, b"{", 400, "The body is not JSON"),
    "a list": (CHAT, b"[]", 400, "Expected `object`"),
    "twice": (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400, "occurs twice"),
    "type": (COMPLETIONS, {**GREEDY, "max_tokens": "5"}, 400, "'max_tokens'"),
    "negative": (COMPLETIONS, {**GREEDY, "max_tokens": -1}, 400, "max_tokens is -1"),
    "temperature": (COMPLETIONS, {**GREEDY, "temperature": -1}, 400, "temperature is -1"),
    "unknown": (COMPLETIONS, {**GREEDY, "temprature": 1}, 400, "'temprature' is not a field"),
    "model": (COMPLETIONS, {**GREEDY, "model": "gpt-4o"}, 404, "'gpt-4o' is not served here; choose one of chat"),
    "empty": (COMPLETIONS, {**GREEDY, "prompt": ""}, 400, "prompt is empty"),
    "mixture": (COMPLETIONS, {**GREEDY, "prompt": ["a", 1]}, 400, "mixes texts and token ids"),
    "ids": (COMPLETIONS, {**GREEDY, "prompt": [10 ** 9]}, 400, "prompt has the id 1000000000"),
    "long": (COMPLETIONS, {**GREEDY, "prompt": "fox " * 3000}, 400, "more than the context of 512"),
    "n": (COMPLETIONS, {**GREEDY, "n": 99}, 400, "n is 99"),
    "suffix": (COMPLETIONS, {**GREEDY, "suffix": "end"}, 400, "suffix is not supported here"),
    "best_of": (COMPLETIONS, {**GREEDY, "best_of": 3}, 400, "best_of is '3'"),
    "stop": (COMPLETIONS, {**GREEDY, "stop": "x" * 100_000}, 400, "stop has a string of 100000 characters"),
    "regex": (COMPLETIONS, {**GREEDY, "regex": "("}, 400, "regex"),
    "no messages": (CHAT, {"messages": []}, 400, "messages is empty"),
    "role": (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role is 'king'"),
    "content": (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:"}}]}]}, 400, "a part of the type 'image_url'"),
    "functions": (CHAT, {"messages": HELLO, "functions": []}, 400, "give tools and tool_choice instead"),
    "hiccup": (CHAT, {"messages": HELLO, "response_format": {"type": "hiccup"}}, 400, "its type is 'hiccup'"),
    "schema": (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"type": 7}}}}, 400, "json schema"),
    "tools": (CHAT, {"messages": HELLO, "tools": [{"type": "web_search"}]}, 400, "only functions are called"),
    "choice": (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "there are no tools"),
    "named": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {
        "name": "x"}}}, 400, "'x', which is none of the tools"),
    "arguments": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {
        "name": "f", "arguments": "{"}}]}]}, 400, "are not JSON"),
    "list of arguments": (CHAT, said({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}), 400,
                          "the arguments of 'f' are not a JSON object"),
    "calls": (CHAT, said({"tool_calls": {}}), 400, "messages[0].tool_calls is not a list"),
    "old call": (CHAT, said({"function_call": {"name": "f"}}), 400, "messages[0].function_call is not supported"),
    "audio": (CHAT, said({"audio": {"id": "a"}}), 400, "messages[0].audio is not supported"),
    "name of a tool": (CHAT, called("a b"), 400, "tools[0].function.name must have 1 to 128 characters and no spaces"),
    "marker as a name": (CHAT, called("</tool_call>"), 400, "tools[0].function.name"),
    "parameters": (CHAT, called("f", {"type": "array"}), 400, "tools[0].function.parameters must be a JSON schema of"),
    "allowed tools": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, 400,
                      "tool_choice.type is 'allowed_tools'"),
    "template": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": "x"}}, 400, "chat_template_kwargs.tools"),
    "stopped": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"stopped": 1}}, 400, "chat_template_kwargs.stopped"),
    "most": (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens is 0"),
    "bias": (COMPLETIONS, {**GREEDY, "logit_bias": {"-1": 1}}, 400, "logit_bias names token -1"),
    "format": (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, 400, "text.format: A JSON"),
    "verbosity": (RESPONSES, {"input": "a", "text": {"verbosity": "low"}}, 400, "text.verbosity is 'low'"),
    "part of text": (RESPONSES, {"input": "a", "text": {"colour": 1}}, 400, "'text.colour' is not a field"),
    "effort": (RESPONSES, {"input": "a", "reasoning": {"effort": 5}}, 400, "'reasoning.effort'"),
    "documents": ("/v1/rerank", {"query": "a", "documents": ["a"] * 3000}, 400, "documents has 3000 texts"),
    "kept": (RESPONSES, {"input": "a", "previous_response_id": "x"}, 400, "keeps no answers"),
    "dimensions": ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "dimensions is '3'"),
    "path": ("/v1/engines", {}, 404, "There is nothing at '/v1/engines'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_refusal_names_the_field(running: Running, case: str) -> None:
    path, body, status, words = REFUSED[case]
    found = running.ask(path, body)
    assert found.status == status and words in found.error, found.body
    assert set(found.json["error"]) == {"message", "type", "param", "code"}


def test_errors_of_the_engine_have_their_field(running: Running) -> None:
    assert running.ask(COMPLETIONS, {**GREEDY, "logit_bias": {"-1": 1}}).json["error"]["param"] == "logit_bias"


def test_a_wrong_method(running: Running) -> None:
    found = running.ask(CHAT)
    assert found.status == 405 and "use POST" in found.error


@pytest.mark.parametrize(("path", "body", "status", "words"), [
    ("/api/chat", {"model": "other", "messages": HELLO}, 404, "'other' is not served here"),
    ("/api/chat", {"model": "chat", "messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "images"),
    ("/api/chat", {"model": "chat", "messages": HELLO, "options": {"heat": 1}}, 400, "options.heat is not an option"),
    ("/api/generate", {"model": "chat", "prompt": "a", "format": "xml"}, 400, "format is 'xml'"),
    ("/api/generate", {"model": "chat", "prompt": "a", "options": {"stop": [1]}}, 400, "options.stop"),
    ("/api/generate", {"model": "chat", "prompt": "a", "options": {"temperature": "hot"}}, 400, "temperature is 'hot'"),
    ("/api/chat", {"model": "chat", "messages": HELLO, "logprobs": True}, 400, "logprobs is not supported"),
    ("/api/embed", {"model": "chat", "input": "a", "dimensions": 3}, 400, "dimensions is '3'"),
    ("/api/embed", {"model": "chat", "input": "fox " * 2000, "truncate": False}, 400, "more than the context of 512"),
    ("/api/embed", {"model": "chat", "input": "a", "options": {"heat": 1}}, 400, "options.heat is not an option"),
])
def test_ollamas_errors(running: Running, path: str, body: Any, status: int, words: str) -> None:
    found = running.ask(path, body)
    assert found.status == status and words in found.json["error"]


@pytest.mark.parametrize(("body", "words"), [
    ({"model": "chat", "messages": HELLO}, "max_tokens"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 0}, "max_tokens is 0"),
    ({"model": "chat", "messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}, "'image'"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "tools": [{"type": "bash_20250124"}]}, "tools[0].type"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "mcp_servers": [{}]}, "give their functions as tools"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "tools": [{"name": "a b"}]}, "tools[0].name must have"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "tools": [{"name": "a", "input_schema": 5}]},
     "tools[0].input_schema must be"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "thinking": {"type": "hard"}}, "thinking.type is 'hard'"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "output_config": {"tone": 1}}, "'output_config.tone'"),
    ({"model": "chat", "messages": HELLO, "max_tokens": 5, "output_config": {"format": {"type": "json_schema",
                                                                                      "schema": {"type": 7}}}},
     "output_config.format: The json schema"),
    ({"model": "chat", "messages": [*HELLO, {"role": "assistant", "content": "I"}], "max_tokens": 5},
     "messages ends with one of the assistant"),
])
def test_anthropics_errors(running: Running, body: Any, words: str) -> None:
    found = running.ask("/v1/messages", body).json
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert words in found["error"]["message"]
