"""Models that are opened when a request names them: within one budget, once, and whatever their clients do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette")
from edgeinfer import LLM
from edgeinfer.errors import BudgetError, ModelNotFoundError
from tests.helpers.serving import chat_model, serving, until

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def small(source: str, left: int | None) -> LLM:
    """Open a model with a small pool."""
    return LLM(source, budget=left, ctx=64, threads=1, max_sequences=2)


def test_models_are_opened_and_closed_on_demand(tmp_path: Path) -> None:
    opened = list[str]()

    def opener(source: str, left: int | None) -> LLM:
        opened.append(source)
        return LLM(source, budget=left, ctx=512, threads=1, max_sequences=8)

    with serving({"demo": "demo", "chat": chat_model(tmp_path)}, opener, keep_alive_seconds=0.4) as one:
        assert len(one.server.models.open_models()) == 1
        assert one.ask("/v1/chat/completions", {"model": "chat", "messages": [
            {"role": "user", "content": "a"}], "max_tokens": 2}).json["model"] == "chat"
        assert len(opened) == 2
        assert until(lambda: [each.name for each in one.server.models.open_models()] == ["demo"])
        plan = one.server.models.planned_bytes
    with serving({"demo": "demo", "chat": str(tmp_path / "chat")}, budget=int(1.02 * plan)) as one:
        assert one.ask(COMPLETIONS, {**SHORT, "model": "chat"}).status == 200
        assert [each.name for each in one.server.models.open_models()] == ["chat"]
        assert one.ask(COMPLETIONS, {**SHORT, "model": "demo:latest"}).status == 200


def test_a_client_that_leaves_while_a_model_is_opened_leaves_one_behind() -> None:
    begun, go_on, opened = threading.Event(), threading.Event(), list[LLM]()

    def slowly(source: str, left: int | None) -> LLM:
        if source == "slow":
            begun.set()
            assert go_on.wait(300)
        opened.append(small("demo", left))
        return opened[-1]

    with serving({"demo": "demo", "slow": "slow"}, slowly) as one:
        for _ in range(3):
            with one.connect() as connection:
                body = b'{"prompt": "a", "model": "slow"}'
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                                   % len(body) + body)
                assert begun.wait(120)
            assert until(lambda: not one.server.n_requests)
        go_on.set()
        assert one.ask(COMPLETIONS, {**SHORT, "model": "slow"}).status == 200
        assert len(opened) == len(one.server.models.open_models()) == 2
        assert not [line for line in one.log if "Traceback" in line]


def test_models_that_cannot_be_opened() -> None:
    def opener(source: str, left: int | None) -> LLM:
        if source == "large":
            raise BudgetError("The run needs 9 GB, and the budget is 1 GB.")
        if source == "gone":
            raise ModelNotFoundError("There is no file or directory '/srv/models/gone'.")
        return small(source, left)

    with serving({"demo": "demo", "large": "large", "gone": "gone"}, opener) as one:
        found = one.ask(COMPLETIONS, {**SHORT, "model": "gone"})
        assert found.status == 500 and found.error == "The model 'gone' cannot be opened; the server's log says why."
        assert until(lambda: bool(one.log)) and "/srv/models/gone" in one.log[-1]
        found = one.ask(COMPLETIONS, {**SHORT, "model": "large"})
        assert found.status == 400 and "'large' cannot be opened: The run needs 9 GB" in found.error
        assert "retry-after" not in found.headers
        assert one.ask(COMPLETIONS, SHORT).status == 200  # the first one had been closed to make room


def test_more_documents_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "_answer_id", lambda self, word: {"yes": 300, "no": 301}[word])

    def opener(source: str, left: int | None) -> LLM:
        return LLM(source, budget=left, ctx=256, threads=1, max_sequences=2, max_queue=2)

    documents = [f"Tale {i}" for i in range(12)]
    with serving({"demo": "demo"}, opener) as one:
        found = one.ask("/v1/rerank", {"query": "a fox", "documents": documents, "return_documents": True})
        assert found.status == 200, found.body
        scores = [each["relevance_score"] for each in found.json["results"]]
        assert scores == sorted(scores, reverse=True) and len(scores) == 12
        assert all(each["document"]["text"] == documents[each["index"]] for each in found.json["results"])
