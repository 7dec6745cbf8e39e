"""A server over replicas: the texts of one process, whatever replica has a request and whichever is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from edgeinfer import LLM
from edgeinfer.cluster.handing import Piece
from edgeinfer.cluster.job import TEXT, Failed, Item, Job, NotBegun, Speeds, WorkerLost
from edgeinfer.cluster.remote_engine import TRIES
from edgeinfer.cluster.router import Load
from edgeinfer.cluster.serving import Serving
from tests.helpers.replicas import Sender, Within, opener, recorded
from tests.helpers.serving import Answered, Running, chat_model, serving, until
from tests.helpers.sessions import HYBRID, WINDOWED, tokens, write_model

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 12}}, "required": ["place"],
    "additionalProperties": False}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 0.9, "top_p": 0.8}, {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "min_p": 0.02}, {"temperature": 1.2, "top_k": 0, "logprobs": 3},
    {"n": 3, "temperature": 0.8}, {"stop": [" the", "and"], "logprobs": 0}, {"regex": "[a-z ]{30,90}"},
    {"n": 2, "logprobs": 1, "presence_penalty": 0.3}, {"logit_bias": {"300": 4.0, "310": -100}})


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all kinds."""
    found: list[tuple[str, dict[str, Any]]] = []
    for i in range(100):
        body = {"prompt": f"Once upon a time there was fox {i % 13}" + " and a crow" * (i % 7), "seed": i,
                "max_tokens": (1, 7, 40, 120)[i % 4], "ignore_eos": i % 3 > 0, **SAMPLED[i % len(SAMPLED)]}
        if i % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append((COMPLETIONS, body))
    hello = [{"role": "user", "content": "Tell me a tale."}]
    for stream in (False, True):
        found += [
            (CHAT, {"messages": hello, "seed": 3, "max_tokens": 40, "stream": stream}),
            (CHAT, {"messages": hello, "seed": 4, "max_tokens": 60, "stream": stream, "tools": [TOOL],
                    "tool_choice": "required"}),
            (CHAT, {"messages": hello, "seed": 5, "max_tokens": 40, "stream": stream, "logprobs": True,
                    "response_format": SCHEMA})]
    found += [(COMPLETIONS, {"prompt": "The fox ran", "echo": True, "logprobs": 2, "max_tokens": 3, "seed": 1}),
              ("/v1/embeddings", {"input": ["A fox", "A crow and a fox"]}),
              ("/v1/messages", {"model": "chat", "messages": hello, "max_tokens": 9, "temperature": 0}),
              ("/api/generate", {"model": "chat", "prompt": "Once", "stream": False,
                                  "options": {"seed": 2, "num_predict": 12}})]
    return found


REQUESTS = requests()
OWN = ("id", "created", "created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration",
       "prompt_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens", "prompt_eval_count",
       "completion_tokens_details", "input_tokens")
"""Fields that are of the time, of what the prefix cache had, and of how often speculation was worth it."""


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in OWN}
    return [plain(one) for one in value] if isinstance(value, list) else value


def outcome(found: Answered, stream: bool) -> Any:
    """Return an answer without what differs between two runs: events may have one token or several."""
    assert found.status == 200, found.body
    if not stream:
        return plain(found.json)
    texts, logprobs, tools, reasons, usage = dict[int, str](), dict[int, list[Any]](), "", dict[int, str](), None
    for event in found.events:
        assert "error" not in event, event
        usage = plain(event.get("usage")) or usage
        for one in event["choices"]:
            i, delta = one["index"], one.get("delta", {})
            texts[i] = texts.get(i, "") + (one.get("text") or delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                tools += call["function"].get("name", "") + call["function"].get("arguments", "")
            named = one.get("logprobs") or {}
            logprobs.setdefault(i, []).extend(named.get("token_logprobs") or plain(named.get("content") or []))
            if one["finish_reason"]:
                assert i not in reasons
                reasons[i] = one["finish_reason"]
    assert found.body.endswith(b"data: [DONE]\n\n")
    return texts, logprobs, tools, reasons, usage


def all_of(running: Running, at_once: int = 8) -> list[Any]:
    def one(request: tuple[str, dict[str, Any]]) -> Any:
        return outcome(running.ask(*request), bool(request[1].get("stream")))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, REQUESTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def right(model: str) -> list[Any]:
    """Return the answers of one process."""
    with serving({"chat": model}) as running:
        return all_of(running)


@pytest.fixture
def three(model: str) -> list[Within]:
    return [Within(model, f"replica {i}") for i in range(3)]


def equally_fast(replicas: list[Within], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas have the same speeds to the end: on a busy machine those that are measured differ by more than a
    factor of ten, and requests follow them.
    """
    for one in replicas:
        one.facts = one.facts._replace(speeds=Speeds(1e-4, 1e-3))
    monkeypatch.setattr(Load, "learn", lambda *_, **__: None)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_the_texts_of_one_process(model: str, right: list[Any], n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, said = [Within(model, f"replica {i}") for i in range(n)], list[str]()
    equally_fast(replicas, monkeypatch)
    with serving({"chat": model}, opener(replicas, said)) as running:
        assert all_of(running) == right and not said
        assert all(len(one.jobs) > 5 for one in replicas) and until(lambda: all(one.free for one in replicas))
        metrics = running.ask("/metrics").body.decode()
        assert 'edgeinfer:generation_tokens_total{model_name="chat"}' in metrics
        for name in ("up", "planned_bytes", "tokens_per_second", "requests_sent_total", "received_bytes_total"):
            assert metrics.count(f'edgeinfer:replica_{name}{{model_name="chat",replica="replica ') == n
        found = running.ask("/status").json["models"][0]["replicas"]
        assert [one["sent"] for one in found] == [len(one.jobs) for one in replicas]


@pytest.mark.slow
def test_lost_replicas_change_no_text(model: str, right: list[Any], three: list[Within]) -> None:
    said, lost, lock = list[str](), [0], threading.Lock()

    def dies(job: Job, tokens: int) -> bool:
        with lock:
            now = job.key % 3 == 0 and tokens >= job.key % 20
            lost[0] += now
            return now

    for one in three:
        one.lost_after = dies
    with serving({"chat": model}, opener(three, said)) as running:
        assert all_of(running) == right
    assert lost[0] > 10 and sum("is lost (killed); others continue" in one for one in said) > 5, (lost, said)
    assert sum(len(job.generated) > 0 for one in three for job in one.jobs) > 3


def test_prompts_of_one_request_are_spread(model: str, three: list[Within], monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": [f"{i} foxes" for i in range(12)], "max_tokens": 30, "temperature": 0}
    equally_fast(three, monkeypatch)
    with serving({"chat": model}, opener(three, [])) as running:
        assert running.ask(COMPLETIONS, body).status == 200
    assert sum(len(one.jobs) for one in three) == 12 and min(len(one.jobs) for one in three) == 4


def test_a_client_that_leaves_frees_its_replica(model: str, three: list[Within]) -> None:
    with serving({"chat": model}, opener(three, [])) as running:
        connection = running.connect()
        body = json.dumps({"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True, "n": 8}).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s"
                           % (len(body), body))
        connection.recv(4096)
        connection.close()
        assert until(lambda: all(one.free for one in three)) and until(lambda: not running.server.answers)


def test_what_is_refused_is_refused_before_a_stream_begins(model: str, three: list[Within]) -> None:
    with serving({"chat": model}, opener(three, [])) as running:
        for body, sentence in (({"prompt": "fox " * 2000}, "more than the context of 512"),
                               ({"prompt": "fox", "grammar": "root ::= ("}, "grammar"),
                               ({"prompt": [100000]}, "prompt has the id 100000")):
            found = running.ask(COMPLETIONS, {**body, "stream": True})
            assert found.status == 400 and sentence in found.error
    assert not any(one.jobs for one in three)


def test_another_arithmetic_is_used_where_no_other_is_left_and_named(model: str) -> None:
    replicas = [Within(model, "a", "avx2"), Within(model, "b", "avx2"), Within(model, "c", "generic")]
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    said = list[str]()
    with serving({"chat": model}, opener(replicas, said)) as running:
        assert all("edgeinfer-arithmetic" not in running.ask(COMPLETIONS, body).headers for _ in range(8))
        assert not replicas[2].jobs
        for one in replicas[:2]:
            one.back.clear()
            one.lost_after = lambda job, tokens: True
        thread = threading.Thread(target=running.ask, args=(COMPLETIONS, body))
        thread.start()  # it has begun in the other arithmetic, and waits for it
        assert until(lambda: len(said) == 2)
        for stream in (False, True):
            assert running.ask(COMPLETIONS, {**body, "stream": stream}).headers["edgeinfer-arithmetic"] == "generic"
        n = len(replicas[2].jobs)
        for one in replicas[:2]:
            one.lost_after = None
            one.back.set()
        thread.join(120)
        assert not thread.is_alive() and len(replicas[2].jobs) == n


def test_without_any_replica_requests_end_with_an_error(model: str) -> None:
    replicas = [Within(model, "a", reopens=False)]
    replicas[0].lost_after = lambda job, tokens: True
    said = list[str]()
    with serving({"chat": model}, opener(replicas, said)) as running:
        for _ in range(2):
            found = running.ask(COMPLETIONS, {"prompt": "Once"})
            assert found.status == 503 and "No replica is left" in found.error
        assert said[-1] == "a does not come back (no such node)."


def test_a_request_that_moved_has_no_more_than_its_prompt_cached(model: str, three: list[Within]) -> None:
    first, second = three[:2]
    body = {"prompt": "A fox saw a crow " * 12, "seed": 1, "max_tokens": 120, "ignore_eos": True}
    first.facts = first.facts._replace(speeds=Speeds(1e-7, 1e-7))
    second.llm.generate(**body, reuse=True)  # it has the prompt and the answer
    first.lost_after = second.lost_after = lambda job, tokens: job.key == 0 and tokens > 60
    with serving({"chat": model}, opener([first, second], [])) as running:
        usage = running.ask(COMPLETIONS, body).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_speeds_are_those_of_the_passes_of_each_replica(model: str, three: list[Within]) -> None:
    """Requests in company, so that none of them says anything of the speed by its own time."""
    for one in three:
        one._told = lambda speeds: speeds  # type: ignore[method-assign]
        one.facts = one.facts._replace(speeds=Speeds(1.0, 1.0))
    seen = [recorded(one.llm) for one in three]
    body = {"prompt": [f"{i} foxes saw a crow and a hare by the river" for i in range(16)], "max_tokens": 30}
    with serving({"chat": model}, opener(three, [])) as running:
        assert running.ask(COMPLETIONS, {**body, "temperature": 0, "ignore_eos": True}).status == 200
        places = running.server.models.first.model.engine.places
        for place, one, passes in zip(places, three, seen, strict=True):
            assert place.speeds[:2] in passes  # the last pass may be recorded later
            assert one.jobs and 0 < place.speeds.decode < 0.5 and 0 < place.speeds.prompt < 0.5


def test_a_replica_that_is_lost_without_requests_is_opened_again(model: str, three: list[Within]) -> None:
    said = list[str]()
    with serving({"chat": model}, opener(three, said)) as running:
        assert running.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 2}).status == 200
        for _ in range(2):
            three[2].idle_end.set()
            assert until(lambda: said[-1:] == ["replica 2 is back."]), said
            assert said[0] == "replica 2 is lost (killed); others continue its requests."
            said.clear()


def test_replicas_that_had_not_begun_with_a_request_are_not_lost_with_it(model: str) -> None:
    one, times = Within(model, "a"), [3 * TRIES]
    real = one.run

    async def run(job: Job) -> AsyncIterator[Item]:
        if times[0]:
            times[0] -= 1
            raise NotBegun("its process has started again")
        async for item in real(job):
            yield item

    one.run = run  # type: ignore[method-assign]
    with serving({"chat": model}, opener([one], [])) as running:
        assert running.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 2}).status == 200 and not times[0]
        one.lost_after = lambda job, tokens: True
        found = running.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 2})
        assert found.status == 500 and f"{TRIES} replicas ended while they had this request" in found.error


def slow_prompts(replicas: list[Within], helping: int = 1) -> None:
    """Let all but the first replicas have prompts computed by these wherever they can."""
    for i, one in enumerate(replicas):
        one.facts = one.facts._replace(speeds=Speeds(1e-5 if i < helping else 1.0, 1e-3, 1e-9))


@pytest.mark.slow
def test_prompts_that_are_computed_apart_change_no_text(model: str, right: list[Any], three: list[Within]) -> None:
    said, lost = list[str](), [0]

    def dies(job: Job, tokens: int) -> bool:
        lost[0] += (now := job.key % 9 == 0)
        return now

    three[0].lost_after = dies
    slow_prompts(three)
    with serving({"chat": model}, opener(three, said, helping=1)) as running:
        assert all_of(running) == right
        found = running.ask("/status").json["models"][0]["replicas"]
    handed = [job for one in three[1:] for job in one.jobs if job.handed]
    assert len(handed) > 60 and lost[0] > 5 and any("replica 0 is lost (killed)" in one for one in said)
    assert [one["prefills"] for one in found] == [True, False, False]
    received = sum(one["received_bytes"] for one in found)
    assert received and all(one.free for one in three)
    expected = sum(one["expected_bytes"] for one in found)
    header = 1000 * len(handed)  # of small prompts of a small model, it is more than a hundredth
    assert expected < received < expected + header
    assert until(lambda: not any(len(one._serving.handing) for one in three))


def test_a_prompt_that_is_lost_on_the_way_is_computed_again(model: str, three: list[Within],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = Sender.piece, list[int]()

    async def piece(self: Sender, offset: int) -> Piece:
        if offset:
            lost.append(offset)
            raise WorkerLost("the link is down")
        return (await real(self, offset))._replace(more=True)

    body = {"prompt": "A fox saw a crow " * 12, "seed": 1, "max_tokens": 20, "ignore_eos": True}
    slow_prompts(three)
    with serving({"chat": model}, opener(three, [], helping=1)) as running:
        first = running.ask(COMPLETIONS, body).json
        monkeypatch.setattr(Sender, "piece", piece)
        body["prompt"] = "Now " + body["prompt"]
        second = running.ask(COMPLETIONS, body).json
        assert until(lambda: not len(three[0]._serving.handing)) and lost
        found = running.ask("/status").json["models"][0]["replicas"]
        assert second["choices"][0]["text"] == three[0].llm.generate(**body)
    assert sum(len(one.prompts) for one in three) == 2 == sum(bool(job.handed) for one in three for job in one.jobs)
    assert sum(one["received_bytes"] > 0 for one in found) == 1
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_without_those_that_answer_the_others_do(model: str, three: list[Within]) -> None:
    slow_prompts(three)
    for one in three[1:]:
        one.reopens, one.lost_after = False, lambda job, tokens: True
    with serving({"chat": model}, opener(three, [], helping=1)) as running:
        assert running.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 8}).status == 200
    assert len(three[0].jobs) == 1


@pytest.mark.parametrize(("config", "chunks"), [(WINDOWED, (64, 64)), (HYBRID, (512, 64)), (WINDOWED, (64, 512))],
                         ids=["windowed", "recurrent", "unlike"])
def test_windows_and_recurrent_state_go_over(config: Any, chunks: tuple[int, int], tmp_path: Path) -> None:
    path, ids = write_model(tmp_path / "model", config), tokens(500, vocab_size=config.vocab_size)
    options = dict(max_tokens=40, seed=3, temperature=0.8, ignore_eos=True, logprobs=0)
    with ExitStack() as held:
        first, second = (held.enter_context(LLM(path, ctx=640, threads=1, prefill_chunk=n)) for n in chunks)

        seen = recorded(first)

        async def run() -> list[Any]:
            one, other, job = Serving(first), Serving(second), Job(1, TEXT, ids, options)
            assert one.prefill(job)
            found = [item async for item in other.run(job._replace(handed=Sender(one.handing, 1)))]
            told = await one.prefilled(1)  # its last pass may be recorded later
            assert told is not None and told.cached_tokens == 0 and told.speeds[:2] in seen
            one.cancel(1)
            assert not len(one.handing) and not one._computing
            return found

        *items, done = asyncio.run(run())
        parts = [part for item in (*items, done.parts) for part in item]
        right = first.request(ids, options).finish()
        assert tuple(token for part in parts for token in part.ids) == right.token_ids
        assert tuple(one for part in parts for one in part.logprobs) == right.logprobs
        if first.plan.windowed and not second.plan.windowed:
            assert done.received_bytes == done.cached_tokens == 0
            return
        expected = first.plan.sequence_bytes(len(ids) - 1)
        assert done.cached_tokens == 499 and expected * 0.5 < done.received_bytes < expected + 8000


def test_a_job_that_is_cancelled_while_its_prompt_comes_does_not_begin(three: list[Within]) -> None:
    serving, job = three[0]._serving, Job(1, TEXT, [1, 2, 3], {"max_tokens": 4})
    coming = asyncio.Event()

    class Slow:
        async def piece(self, offset: int) -> Piece:
            coming.set()
            await asyncio.sleep(0.05)
            return Piece(b"x", True, 0.0)

    async def run() -> list[Any]:
        task = asyncio.ensure_future(anext(serving.run(job._replace(handed=Slow()))))
        await coming.wait()
        serving.cancel(1)
        return [await task]

    [item] = asyncio.run(run())
    assert isinstance(item, Failed) and "cancelled before it began" in str(item.error)
    assert not serving._running and not len(serving.handing)
