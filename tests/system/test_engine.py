"""Requests that run together get the text that each gets alone, whatever shares their forward passes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Engine, Generation, Request, run_alone
from edgeinfer.errors import ClosedError, QueueFullError, RequestError
from tests.helpers.at_once import asked_for, each_alone, engine_of, together
from tests.helpers.sessions import TINY, running, tokens, write_model
from tests.helpers.tasks import held

CTX = 192


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["onnx-cpu", "pages"])
def test_on_devices_of_others(folder: Path, device: str) -> None:
    """Their bits depend on the number of tokens of a pass, so that texts are compared, of clear choices."""
    plain = {"temperature": 0.0, "logprobs": None, "n": 1}
    requests = [one._replace(config=replace(one.config, **plain)) for one in asked_for(24, 5, beams=False)
                if not one.scored]
    path = write_model(folder, TINY, "f32")
    with running(path, device, ctx=CTX) as runner:
        want = each_alone(runner, requests)
    with running(path, device, ctx=CTX, max_sequences=4) as runner, engine_of(runner) as engine:
        assert together(engine, requests, True, False) == want


def test_a_short_prompt_does_not_wait_for_a_long_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the long one is not starved by those that keep coming."""
    ended, conclude = list[Request[Any]](), Request.conclude

    def noted(request: Request[Any], *error: Any) -> None:
        ended.append(request)
        conclude(request, *error)

    monkeypatch.setattr(Request, "conclude", noted)
    with running(write_model(folder, TINY), ctx=1024, max_sequences=3, prefill_chunk=16) as runner, \
            engine_of(runner) as engine:
        long, short = (Request(engine, Generation(runner, None, tokens(n), GenerationConfig(max_tokens=2, seed=1)))
                       for n in (900, 5))
        with held(engine, after=1):
            long.start_whole()
            short.start_whole()
        assert len(short.finish().token_ids) == len(long.finish().token_ids) == 2
        assert ended == [short, long]


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
        with pytest.raises(QueueFullError, match=r"^1 requests are waiting for this model, the maximum \(max"):
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
