"""Requests that run together get the text that each gets alone, whatever shares their forward passes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import (
    BeamSearch,
    Engine,
    Generation,
    PromptLookup,
    Request,
    Scoring,
    Speculation,
    Times,
    run_alone,
)
from edgeinfer.errors import ClosedError, QueueFullError, RequestError
from edgeinfer.graph import ExpertsConfig
from edgeinfer.runner import Runner
from tests.helpers.sessions import TINY, WINDOWED, free_blocks, running, tokens, write_model

MODELS = {
    "full attention": TINY,
    "windows": replace(WINDOWED, windows=(0, 96, 40)),
    "experts": replace(TINY, model_type="qwen3_moe", experts=ExpertsConfig(9, 3, 40)),
}
CTX = 192
COMMON = tokens(70, 8)
"""Beginning that a half of the prompts share."""


class Asked(NamedTuple):
    """A request of the test."""

    ids: list[int]
    config: GenerationConfig
    scored: tuple[tuple[int, ...], ...] = ()
    """Continuations to score instead."""


def asked_for(n: int, seed: int, beams: bool = True) -> list[Asked]:
    """Return requests of all kinds."""
    chance, found = random.Random(seed), []
    for number in range(n):
        ids = COMMON[: chance.choice((0, 16, 40, 70))] + tokens(chance.choice((1, 3, 9, 30, 100)), number)
        options: dict[str, Any] = {
            "max_tokens": chance.choice((1, 2, 5, 20, 60, 110)), "seed": number,
            "temperature": chance.choice((0.0, 0.9)),
            "repetition_penalty": chance.choice((1.0, 1.2)), "frequency_penalty": chance.choice((0.0, 0.4)),
            "logprobs": chance.choice((None, None, 0, 3)), "n": chance.choice((1, 1, 1, 2)),
        }
        if beams and number % 9 == 4:
            options = {"beams": 2, "n": 2, "max_tokens": 12, "logprobs": options["logprobs"]}
        scored = tuple(tuple(tokens(chance.choice((1, 4, 9)), 10 + i)) for i in range(3)) if number % 11 == 7 else ()
        found.append(Asked(ids, GenerationConfig(**options), scored))
    return found


def task_of(runner: Runner, asked: Asked, speculation: Speculation | None = None) -> Any:
    """Return the engine's task for a request."""
    if asked.scored:
        return Scoring(runner, asked.ids, [(None, ids) for ids in asked.scored])
    if asked.config.beams > 1:
        return BeamSearch(runner, None, asked.ids, asked.config, (5,))
    return Generation(runner, None, asked.ids, asked.config, (5,), speculation)


def outcome(found: Any) -> Any:
    """Return what may not differ: tokens, log-probabilities and ends."""
    if isinstance(found, list):
        return [(score.token_ids, score.logprobs, score.greedy) for score in found]
    return [(choice.token_ids, choice.finish_reason, choice.score,
             [(one.token_id, one.logprob, one.top) for one in choice.logprobs or ()]) for choice in found.choices]


@contextmanager
def engine_of(runner: Runner, **options: Any) -> Iterator[Engine]:
    """An engine whose runner outlives it: blocks are counted behind its end."""
    engine = Engine(runner, **options)
    engine.runner = _Kept(runner)  # type: ignore[assignment]
    try:
        yield engine
    finally:
        engine.close()
    assert free_blocks(runner) == runner.plan.kv_blocks, "blocks were lost"


class _Kept:
    """Stands for a runner that another owner closes."""

    def __init__(self, runner: Runner):
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self) -> None:
        """Leave it open."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def alone(folder: Path, name: str, requests: list[Asked], **options: Any) -> list[Any]:
    """Return what each request gets from a model of its own size, one after the other."""
    with running(write_model(folder, MODELS[name]), ctx=CTX, max_sequences=2, outputs=8, **options) as runner:
        return [outcome(run_alone(task_of(runner, one), runner)) for one in requests]


def together(engine: Engine, requests: list[Asked], reuse: bool, speculate: bool, seed: int = 0) -> list[Any]:
    """Return what requests get that arrive in any order, while others run."""
    order, times = list(range(len(requests))), Times()
    random.Random(seed).shuffle(order)
    made: dict[int, Request[Any]] = {}
    for number in order:
        speculation = Speculation(PromptLookup(), times, 3, 8, asked=True) if speculate else None
        made[number] = Request(engine, task_of(engine.runner, requests[number], speculation), reuse)
        made[number].start_whole()
    return [outcome(made[number].finish()) for number in range(len(requests))]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("reuse", "speculate", "threads", "own"), [
    (True, True, 2, 24), (False, False, 1, None), (True, False, 3, 8), (False, True, 1, 24),
])
def test_all_at_once_as_each_alone(folder: Path, name: str, reuse: bool, speculate: bool, threads: int,
                                   own: int | None) -> None:
    """With `own` so small that the pool is too small for all, requests are preempted."""
    requests = asked_for(60, 3)
    want = alone(folder, name, requests)
    options = {"ctx": CTX, "max_sequences": 6, "outputs": 8, "threads": threads, "own_tokens": own, "draft_tokens": 3}
    with running(write_model(folder, MODELS[name]), **options) as runner, engine_of(runner) as engine:
        have = together(engine, requests, reuse, speculate)
        assert have == want
        assert engine.passes < sum(one.config.max_tokens for one in requests), "they took turns"
        if own == 8:
            assert engine.preemptions, "the pool was not too small"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["onnx-cpu", "pages"])
def test_on_devices_of_others(folder: Path, device: str) -> None:
    """Their bits depend on the number of tokens of a pass, so that texts are compared, of clear choices."""
    plain = {"temperature": 0.0, "logprobs": None, "n": 1}
    requests = [one._replace(config=replace(one.config, **plain)) for one in asked_for(24, 5, beams=False)
                if not one.scored]
    path = write_model(folder, TINY, "f32")
    with running(path, device, ctx=CTX) as runner:
        want = [outcome(run_alone(task_of(runner, one), runner)) for one in requests]
    with running(path, device, ctx=CTX, max_sequences=4) as runner, engine_of(runner) as engine:
        assert together(engine, requests, True, False) == want


def test_a_short_prompt_does_not_wait_for_a_long_one(folder: Path) -> None:
    """And the long one is not starved by those that keep coming."""
    with running(write_model(folder, TINY), ctx=1024, max_sequences=3, prefill_chunk=16) as runner, \
            engine_of(runner) as engine:
        long = Request(engine, Generation(runner, None, tokens(900), GenerationConfig(max_tokens=2, seed=1)))
        long.start_whole()
        short = Request(engine, Generation(runner, None, tokens(5), GenerationConfig(max_tokens=2, seed=1)))
        short.finish()
        assert not long.ended
        assert len(long.finish().token_ids) == 2


def test_one_that_is_cancelled_ends_alone(folder: Path) -> None:
    with running(write_model(folder, TINY), ctx=1024, max_sequences=4) as runner, engine_of(runner) as engine:
        config = GenerationConfig(max_tokens=400, seed=1, ignore_eos=True)
        want = run_alone(Generation(runner, None, tokens(9), config), runner).token_ids
        kept, left = (Request(engine, Generation(runner, None, tokens(9), config)) for _ in range(2))
        kept.start_whole()
        left.start()
        left.cancel()
        assert left.finish().finish_reason == "cancelled"
        assert kept.finish().token_ids == want


def test_an_error_of_one_request_is_its_own(folder: Path) -> None:
    class Failing(Generation):
        def take(self, ran: Any) -> str:
            raise RequestError("this one fails")

    with running(write_model(folder, TINY), ctx=256, max_sequences=4) as runner, engine_of(runner) as engine:
        config = GenerationConfig(max_tokens=20, seed=1)
        good = Request(engine, Generation(runner, None, tokens(9), config))
        good.start_whole()
        with pytest.raises(RequestError, match="this one fails"):
            Request(engine, Failing(runner, None, tokens(9), config)).finish()
        assert good.finish().finish_reason in ("length", "stop")


def test_what_the_engine_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(write_model(folder, TINY), ctx=256, max_sequences=1) as runner:
        engine, forward = Engine(runner, max_queue=1), runner.forward
        monkeypatch.setattr(runner, "forward", lambda *how: until(lambda: engine.closed) and forward(*how))
        config = GenerationConfig(max_tokens=200, seed=1, ignore_eos=True)
        requests = [Request(engine, Generation(runner, None, tokens(9), config)) for _ in range(3)]
        requests[0].start()
        assert until(lambda: engine.n_running == 1)
        requests[1].start()
        with pytest.raises(QueueFullError, match=r"^1 requests wait for this model, the most that may \(max"):
            requests[2].start()
        engine.close()
        assert requests[0].finish().finish_reason == "cancelled"
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            requests[1].finish()
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            Request(engine, Generation(runner, None, tokens(9), config)).finish()


@pytest.mark.slow
def test_cancel_abandon_and_close_at_any_moment(folder: Path) -> None:
    """No block is lost, and the survivors' texts are right."""
    chance, config = random.Random(4), GenerationConfig(max_tokens=40, seed=1)
    with running(write_model(folder, TINY), ctx=256, max_sequences=4, own_tokens=40) as runner, \
            engine_of(runner) as engine:
        want = run_alone(Generation(runner, None, tokens(60), config), runner).token_ids

        def ask(number: int) -> None:
            request = Request(engine, Generation(runner, None, tokens(60), config), reuse=number % 2 == 0)
            what = (number * 7) % 4
            if what == 0:
                assert request.finish().token_ids == want
                return
            if what == 1:
                request.start()
                time.sleep(chance.random() / 50)
            elif what == 2:
                request.next_piece()
            request.cancel()
            request.close()
            assert request.ended

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(400)))


def test_the_thread_ends_when_nobody_asks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("edgeinfer.engine.engine.LINGER_SECONDS", 0.01)
    with running(write_model(folder, TINY), ctx=64) as runner, engine_of(runner) as engine:
        for _ in range(3):
            Request(engine, Generation(runner, None, [1], GenerationConfig(max_tokens=2, seed=1))).finish()
            assert until(lambda: all("edgeinfer engine" not in one.name for one in threading.enumerate()))


def until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, for a minute at most."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
