"""Whatever goes wrong with a request is said in one sentence to its caller, and no other request notices."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import LLM
from edgeinfer.errors import CancelledError, EdgeInferError, RequestError
from edgeinfer.llm.asynchronous import _event_of
from tests.helpers.sessions import TINY, free_blocks, write_model
from tests.helpers.tasks import held, within

POOL = 512
LONG: dict[str, Any] = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
FABLE = "The fox and the crow. " * 14


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=POOL, threads=1, max_sequences=4, kv_tokens=POOL) as opened:
        yield opened


@pytest.fixture(scope="module")
def pruning() -> Iterator[LLM]:
    with LLM("demo", ctx=POOL, threads=1, max_sequences=3, prefill_chunk=16, lazy="keep=0.7,0.5,0.35") as opened:
        yield opened


@contextmanager
def company(llm: LLM) -> Iterator[None]:
    """Run a request beside, which must get its text, and check that no block is lost."""
    want = llm.complete("Once upon a time", **LONG).token_ids
    beside = llm.request("Once upon a time", LONG)
    beside.start_whole()
    yield
    assert beside.finish().token_ids == want
    llm.runner.drop_prefixes()
    assert free_blocks(llm.runner) == llm.plan.kv_blocks


def raising(error: BaseException, at: int) -> Callable[..., None]:
    """A callback that raises when it is called for the n-th time."""
    calls = []

    def callback(*given: object) -> None:
        calls.append(given)
        if len(calls) == at:
            raise error

    return callback


# -- callbacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CancelledError])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("opened", ["llm", "pruning"])
def test_an_error_of_a_callback_ends_its_request(error: type[BaseException], at: int, opened: str,
                                                 request: pytest.FixtureRequest) -> None:
    model: LLM = request.getfixturevalue(opened)
    with company(model), pytest.raises(error, match="of the callback"):
        model.generate(FABLE, max_tokens=5, progress=raising(error("of the callback"), at))


def test_a_callback_cannot_wait_for_a_request(llm: LLM) -> None:
    with company(llm), pytest.raises(RequestError, match=r"^A callback cannot wait for a request: it runs in "):
        llm.generate(FABLE, max_tokens=3, progress=lambda *given: llm.generate("x", max_tokens=1))


def test_a_pruned_prompt_is_cancelled_although_others_run(pruning: LLM) -> None:
    made: list[Any] = []
    calls = []

    def cancel(*given: object) -> None:
        calls.append(given)
        if len(calls) == 2:
            made[0].cancel()

    with company(pruning):
        made.append(pruning.request(FABLE, {"max_tokens": 5, "progress": cancel}))
        assert made[0].finish().finish_reason == "cancelled" and len(calls) == 2


def test_an_event_loop_that_is_closed_is_no_error(llm: LLM) -> None:
    request = llm.request("Once", {"max_tokens": 2})

    async def leave() -> None:
        _event_of(request)

    asyncio.run(leave())
    with company(llm):
        assert request.finish().finish_reason == "length"


# -- pools -------------------------------------------------------------------------------------------------------------


def test_a_saved_prompt_waits_for_room(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompt.kv"
    want = llm.complete(FABLE, max_tokens=4, temperature=0, prompt_cache=file)
    taken = llm.stream([5] * 450, max_tokens=60, ignore_eos=True)
    next(taken)
    again = llm.complete(FABLE, max_tokens=4, temperature=0, prompt_cache=file)
    taken.close()
    assert again.token_ids == want.token_ids and again.cached_tokens == want.prompt_tokens - 1


@pytest.mark.parametrize(("ask", "sentence"), [
    (lambda llm: llm.complete([5] * 400, max_tokens=5), "A prompt of 400 tokens and up to 5 new ones may need 26 "),
    (lambda llm: llm.complete([5] * 90, max_tokens=400), "A prompt of 90 tokens and up to 400 new ones may need 31 "),
    (lambda llm: llm.complete([5] * 90, max_tokens=90, n=4), "4 samples of up to 90 tokens after a prompt of 90 may "),
    (lambda llm: llm.complete([5] * 90, max_tokens=90, beams=4), "4 beams of up to 90 tokens after a prompt of 90 ma"),
    (lambda llm: llm.score([5] * 200, [[6], [6] * 90]), "A prompt of 200 tokens and a continuation of 90 may need 19 "),
    (lambda llm: llm.embed([[5] * 400]), "A text of 400 tokens may need 25 KV blocks of 16 tokens, and the model is"),
])
def test_what_the_pool_can_never_hold(ask: Callable[[LLM], Any], sentence: str) -> None:
    with LLM("demo", ctx=POOL, threads=1, max_sequences=4, kv_tokens=256) as llm, company(llm), \
            pytest.raises(RequestError, match=rf"^{sentence}[^\n]* more KV memory \(--kv-memory\)\.$"):
        ask(llm)


def test_what_fills_the_pool_to_its_last_block() -> None:
    with LLM("demo", ctx=POOL, threads=1, max_sequences=4, kv_tokens=256) as llm, company(llm):
        assert llm.embed([[5] * 256]).shape[0] == 1
        assert len(llm.score([5] * 200, [[6] * 57])[0].logprobs) == 57
        assert llm.complete([5] * 200, max_tokens=57, ignore_eos=True).completion_tokens == 57


@pytest.mark.slow
def test_beams_and_samples_in_a_pool_for_one_of_them() -> None:
    with LLM("demo", ctx=POOL, threads=1, max_sequences=4, kv_tokens=400) as llm:
        kinds: list[dict[str, Any]] = [{"beams": 3, "max_tokens": 80}, {"n": 3, "seed": 1, "max_tokens": 80},
                                       {"max_tokens": 120, "seed": 2}]
        asked = [(f"Tale {number}. {FABLE[:150]}", {**kinds[number % 3], "ignore_eos": True}) for number in range(9)]
        want = [llm.complete(prompt, **options).choices for prompt, options in asked]
        requests = [llm.request(prompt, options) for prompt, options in asked]
        with held(llm, after=2):
            for request in requests:
                request.start_whole()
        assert [request.finish().choices for request in requests] == want
        assert llm._engine.preemptions
        assert free_blocks(llm.runner) == llm.plan.kv_blocks


# -- forms and answers that go on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["a{50000}", "a" * 20_000, "(b|c)a{20000}", "(a?){500}a{500}"])
def test_a_form_that_takes_too_long_is_refused(llm: LLM, pattern: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    form = {"type": "regex", "pattern": pattern}
    refusal = r"^The (regex cannot be used|form of the text cannot be followed): [^\n<]{10,300}$"
    with company(llm), pytest.raises(RequestError, match=refusal) as refused:
        llm.complete("Once", response_format=form, max_tokens=60, seed=1)
    if "?" not in pattern:
        assert re.search(r"it forces \d+ tokens in a row, and at most 4096 are taken; shorten", str(refused.value))


def test_a_form_wants_a_tokenizer(tmp_path: Path) -> None:
    with LLM(write_model(tmp_path, TINY), ctx=64, threads=1) as llm, \
            pytest.raises(RequestError, match=r"^Texts of a given form need a tokenizer, and this bundle has none"):
        llm.complete([5], response_format={"type": "json_object"})


def test_an_answer_that_has_ended_already_goes_no_further(llm: LLM) -> None:
    end = min(llm._eos_ids)
    with company(llm):
        done = llm.complete("Once", max_tokens=4, generated=[5, end])
        assert done.token_ids == (5,) and done.finish_reason == "stop" and done.ttft_ms is None


# -- many at once ------------------------------------------------------------------------------------------------------


def test_tasks_that_time_out_leave_nothing_behind(llm: LLM) -> None:
    from edgeinfer import AsyncLLM

    served = AsyncLLM("demo")
    served.llm = llm

    async def one(number: int) -> str:
        try:
            return await asyncio.wait_for(served.generate("Once upon a time", **LONG), 0.002 * (number % 40))
        except asyncio.TimeoutError:
            return ""

    async def main() -> list[str]:
        return await asyncio.gather(*[one(number) for number in range(80)])

    with company(llm):
        want = llm.generate("Once upon a time", **LONG)
        assert set(asyncio.run(main())) <= {"", want}
        assert within(120, lambda: llm._engine.n_running == llm._engine.n_waiting == 0)


def test_a_full_queue_refuses_and_serves_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._engine, "_most_waiting", 3)
    want, refused, lock = llm.generate("Once", **LONG), [], threading.Lock()
    texts = set()

    def ask() -> None:
        try:
            texts.add(llm.generate("Once", **LONG))
        except EdgeInferError as error:
            with lock:
                refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    with company(llm):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {want} and refused
    sentence = r"\d+ requests are waiting for this model, the maximum \(max_queue\); retry later\."
    assert all(re.fullmatch(sentence, one) for one in refused)
