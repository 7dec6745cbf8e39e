"""The server with damaged bodies and headers: a few hundred cases of the fuzzer's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
from tests.fuzz.requests import BODIES, Requests, request
from tests.fuzz.worker import rng_of

CASES = 200


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requests]:
    one = Requests(tmp_path_factory.mktemp("fuzz"))
    yield one
    one.close()


def test_valid_bodies_are_served(target: Requests) -> None:
    for path, bodies in BODIES.items():
        for body in bodies:
            found = target.send(request(path, json.dumps(body).encode()))
            assert found and (found.status == 200 or target.message(found) in target.refused), (path, body, found)
    assert len(target.refused) == 1, "the demo ranks no documents, and everything else is served"


def test_damaged_requests_are_served_or_refused(target: Requests) -> None:
    served = [target.run(rng_of(1, "request", number)) for number in range(CASES)]
    assert 0.1 * CASES < sum(served) < 0.5 * CASES
    target.canary()


@pytest.mark.parametrize(("path", "body", "told"), [
    ("/v1/responses", {"input": "Hi", "text": {"format": "x"}}, "text.format"),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effort": []}}, "reasoning.effort"),
    ("/v1/responses", {"input": [], "instructions": "Be brief."}, "input is empty"),
    ("/v1/responses", {"input": [{"role": "user"}], "instructions": "Be brief."}, "input[0]"),
    ("/v1/messages", {"model": "demo", "max_tokens": 3, "system": "Hi", "messages": [{"role": "x"}]}, "messages[0]"),
    ("/v1/messages", {"model": "demo", "max_tokens": 3, "system": "Hi", "messages": []}, "messages is empty"),
    ("/v1/messages", {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}],
                      "stop_sequences": [""]}, "stop_sequences has a string of 0 characters"),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "options": {"stop": 0}}, "options.stop"),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "options": {"\0": 1}}, "options.\\x00 is not an option"),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "format": {"type": "a"}}, "format: The json schema cannot be"),
    ("/v1/completions", {"prompt": "Hi", "response_format": {"type": "json_object", "schema": {"type": 1}}},
     "response_format: The json schema cannot be used: type must be"),
    ("/v1/completions", {"prompt": "Hi", "regex": "a("}, "regex: The regex cannot be used"),
    ("/v1/completions", {"prompt": [5, -1], "echo": True}, "prompt has the id -1; ids are from 0 to 4095"),
    ("/detokenize", {"tokens": [4096]}, "tokens has the id 4096"),
    ("/v1/completions", {"prompt": "Hi", "../x": 1}, "'../x' is not a field"),
    ("/v1/completions", [], "Expected `object`, got `array` in the body"),
])
def test_refusals_name_the_field(target: Requests, path: str, body: object, told: str) -> None:
    found = target.server.ask(path, body)
    assert found.status == 400 and told in target.message(found)


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/v1/completions", {"prompt": "a" * 9000}, "prompt"), ("/v1/embeddings", {"input": [1] * 9000}, "input"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
    ("/v1/responses", {"input": "a" * 9000}, "input"), ("/v1/embeddings", {"input": [-1]}, "input"),
])
def test_prompts_that_are_wrong_name_their_field(target: Requests, path: str, body: object, field: str) -> None:
    found = target.server.ask(path, body)
    assert found.status == 400 and found.json["error"]["param"] == field


def test_what_is_not_http_gets_an_error_object(target: Requests) -> None:
    found = target.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n")
    assert found and found.status == 400 and found.error == "The request is not HTTP: bad Content-Length"
