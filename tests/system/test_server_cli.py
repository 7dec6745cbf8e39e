"""Commands that speak to a server, chat and bench --serve; and how serve opens models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("starlette")
from edgeinfer.base.api_client import ApiClient
from edgeinfer.errors import ContextError, EdgeInferError, RequestError, UsageError
from tests.helpers.command_line import edgeinfer
from tests.helpers.serving import Running, chat_model, serving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("chat")
    with serving({"chat": chat_model(folder), "demo": "demo"}, api_keys=("key-of-the-tests",)) as one:
        yield one


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_API_KEY", "key-of-the-tests")


def test_a_chat_over_http(running: Running, key: None) -> None:
    typed = "/set temp 0\n/set max-tokens 12\nTell me a tale.\nAnd now?\n/show\n/stats\n/nothing\n/bye\n"
    found = edgeinfer("chat", running.url, "--system", "Be brief.", stdin=typed.encode())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a tale."}]
    options = {"temperature": 0.0, "max_tokens": 12}
    first = running.llm().chat(messages, **options)
    second = running.llm().chat([*messages, {"role": "assistant", "content": first},
                                 {"role": "user", "content": "And now?"}], **options)
    assert found.code == 0 and f"{first}\n" in found.out and f"{second}\n" in found.out
    assert "of 512 tokens, 2 turns" in found.err and "12 new tokens" in found.err and "no command /nothing" in found.err


def test_a_model_without_a_template_continues_the_text(running: Running, key: None) -> None:
    found = edgeinfer("chat", running.url, "--model", "demo",
                      stdin=b"/set temp 0\n/set max-tokens 8\nOnce upon a time\n/bye\n")
    assert "has no chat template and continues your text" in found.err
    assert running.llm("demo").generate("Once upon a time", temperature=0, max_tokens=8) in found.out


def test_a_conversation_that_is_too_long(running: Running, key: None) -> None:
    found = edgeinfer("chat", running.url, stdin=b"fox " * 2000 + b"\n/bye\n")
    assert found.code == 0 and "fills the context of 512 tokens" in found.err


def test_bench_of_a_server(running: Running, key: None) -> None:
    found = edgeinfer("bench", "chat", "--serve", running.url, "--concurrency", "1,3", "-p", "20", "-n", "9", "--json")
    rows = found.json["serving"]
    assert [row["concurrency"] for row in rows] == [1, 3] and [row["requests"] for row in rows] == [4, 12]
    for row in rows:
        n = row["requests"]
        assert row["total_input_tokens"] == 20 * n and row["total_output_tokens"] == 9 * n
        assert 0 < row["ttft_ms"]["median"] <= row["e2el_ms"]["median"]
    assert edgeinfer("bench", "--serve", running.url).code == 2


def test_errors_are_sentences(running: Running, key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ApiClient(running.url)
    with pytest.raises(ContextError, match="answered 400: The prompt has"):
        list(client.events("/v1/completions", {"prompt": "fox " * 2000, "stream": True}))
    with pytest.raises(UsageError, match="'ftp://a' is not the URL of a server"):
        ApiClient("ftp://a")
    assert "no model 'other'; choose one of chat, demo" in edgeinfer("chat", running.url, "--model", "other").err
    monkeypatch.delenv("EDGEINFER_API_KEY")
    with pytest.raises(RequestError, match="answered 401: The API key is missing"):
        ApiClient(running.url).ask("/v1/models")
    with pytest.raises(EdgeInferError, match=r"Cannot reach http://127\.0\.0\.1:1: Connection refused"):
        ApiClient("http://127.0.0.1:1").ask("/v1/models")


def test_the_client_reads_events(running: Running, key: None) -> None:
    events = list(ApiClient(running.url + "/v1/").events("/v1/completions", {
        "prompt": "Once", "max_tokens": 3, "stream": True}))
    assert "".join(one["choices"][0]["text"] for one in events) and json.dumps(events)


@pytest.mark.parametrize(("device", "draft", "fills"), [(None, "b", True), ("cuda", None, True),
                                                        ("onnx-cpu", "b", None)])
def test_the_kv_cache_fills_the_memory_of_a_device(device: str | None, draft: str | None, fills: bool | None,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """As `plan --serve` says; there a draft model needs a part of it."""
    from edgeinfer.cli.served import open_served

    monkeypatch.setattr("edgeinfer.llm.LLM", lambda source, **options: options["fill_budget"])
    given = MagicMock(device=device, kv_memory=None, **{"stored.return_value": (None, None)})
    assert open_served("a", None, given=given, techniques={"draft": draft}, sequences=4, queue=1, alone=True) is fills


def test_serve_reports_progress_while_it_opens_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.cli.served import open_served

    def opening(source: str, **options: Any) -> Any:
        options["progress"]("convert", 5, 5, "")
        return options["progress"]

    monkeypatch.setattr("edgeinfer.llm.LLM", opening)
    given = MagicMock(**{"stored.return_value": (None, None)})
    progress: Any = open_served("a", None, given=given, techniques={}, sequences=1, queue=1, alone=False)
    assert not progress._stage and progress._ended.is_set()  # nothing more is printed
