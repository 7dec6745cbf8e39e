"""Draft tokens never change a text: for any drafter, acceptance and sampling."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import (
    Completion,
    Drafter,
    Engine,
    Generation,
    PromptLookup,
    Request,
    Speculation,
    Times,
    run_alone,
)
from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.llm.api import LLM
from edgeinfer.memory_planner import resolve, to_request
from edgeinfer.runner import Cancellation, Runner
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, free_blocks, running, session, tokens, write_model
from tests.helpers.tasks import Stepped

VOCABULARY = 300
PROMPT = tokens(21, vocab_size=VOCABULARY)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.5}, {"top_k": 0, "top_p": 0.8},
    {"repetition_penalty": 1.4}, {"presence_penalty": 0.7, "temperature": 0.0}, {"frequency_penalty": 0.4},
    {"logit_bias": {5: 2.0, 7: -100.0, 11: 4.0}}, {"logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 0, "logit_bias": {3: 1.5}},
)  # fmt: skip


class Parrot(Drafter):
    """Knows the texts of a request that has run, and is right in a share of its draft tokens."""

    name = "draft"

    def __init__(self, texts: Items[Items[int]], right: float, seed: int = 0, prompt: Items[int] = PROMPT):
        self._texts, self._right, self._random = [[*prompt, *text] for text in texts], right, random.Random(seed)
        self.released = 0

    def propose(self, texts: Items[Any], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        found = []
        for text in texts:
            at = len(text.tokens)
            whole = next(whole for whole in self._texts if whole[:at] == text.tokens)
            propose = [*whole[at : at + n], *(0,) * (at + n - len(whole))]  # after the end it draft tokens as well
            found.append([token if self._random.random() < self._right else self._random.randrange(VOCABULARY)
                          for token in propose])
        return found

    def release(self, texts: Items[Any]) -> None:
        self.released += 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("speculation"), replace(TINY, vocab_size=VOCABULARY))


@pytest.fixture(scope="module", params=["cpu", "onnx-cpu"])
def opened(path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    threads = 2 if request.param == "cpu" else 1  # onnxruntime's spin beside other tests
    with running(path, request.param, max_sequences=3, threads=threads, draft_tokens=7) as one:
        yield one


def complete(runner: Runner, drafter: Drafter | None = None, proposals: int = 7, max_tokens: int = 40,
             eos: Items[int] = (), prompt: list[int] = PROMPT, **options: Any) -> Completion:
    config = GenerationConfig(**{"max_tokens": max_tokens, "seed": 11, **options})
    speculation = drafter and Speculation(drafter, Times(), proposals, runner.config.outputs, fixed=True)
    request = Generation(runner, None, prompt, config, eos, speculation)
    free, one = free_blocks(runner), Stepped(request, runner)
    while not one.ended:
        one.step()
        for sample in request.live:
            assert sample.sequence is None or sample.sequence.tokens == sample.tokens[:-1]
    assert free_blocks(runner) == free
    return one.finish()


def outcome(found: Completion) -> list[Any]:
    return [(choice.token_ids, choice.finish_reason, choice.logprobs) for choice in found.choices]


def same(found: Completion, want: Completion, runner: Runner) -> bool:
    """Return whether two outcomes are the same: to the last bit with our kernels, log-probabilities to 1e-4 with
    others."""
    if isinstance(runner, Session):
        return outcome(found) == outcome(want)
    pairs = [(a.logprob, b.logprob) for one, other in zip(found.choices, want.choices, strict=True)
             for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True)]
    return all(abs(a - b) < 1e-4 for a, b in pairs) and \
        [part[:2] for part in outcome(found)] == [part[:2] for part in outcome(want)]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("n", [1, 3])
def test_the_text_is_the_same_with_any_drafter(opened: Runner, options: dict[str, Any], n: int) -> None:
    plain = complete(opened, n=n, **options)
    texts = [choice.token_ids for choice in plain.choices]
    for proposals, right in ((1, 1.0), (2, 0.6), (3, 0.0), (5, 0.6), (7, 1.0), (7, 0.0)):
        proposed = complete(opened, Parrot(texts, right), proposals, n=n, **options)
        assert same(proposed, plain, opened)
        report = proposed.speculation
        assert report and report.walks and report.accepted <= report.drafted
        assert right or report.accepted < 0.2 * report.drafted
    assert same(complete(opened, PromptLookup(), n=n, **options), plain, opened)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_whatever_threads_chunks_and_kv(path: Path, threads: int, kv: str, chunk: int) -> None:
    options = {"repetition_penalty": 1.2}
    with session(path, threads=threads, kv=kv, prefill_chunk=chunk, draft_tokens=7) as runner:
        plain = complete(runner, **options)
        for proposals in (2, 3, 7):
            assert outcome(complete(runner, Parrot([plain.token_ids], 0.7), proposals, **options)) == outcome(plain)


def test_draft_tokens_take_no_block_that_is_not_there(path: Path) -> None:
    """Texts that end in time need fewer blocks than the draft tokens after their ends would."""
    with session(path, max_sequences=3, ctx=64, draft_tokens=7) as runner:
        texts = [choice.token_ids for choice in complete(runner, n=3).choices]
        held = []
        while runner.kv.pool.n_free > 7:  # one of the prompt, and two of each text up to 48 tokens
            held.append(runner.new_sequence())
            runner.prefill(held[-1], [1])
        eos = {text[25] for text in texts}
        plain = complete(runner, n=3, eos=tuple(eos))
        assert all(choice.finish_reason == "stop" for choice in plain.choices)
        assert max(len(choice.token_ids) for choice in plain.choices) > 20
        proposed = complete(runner, Parrot(texts, 1.0), n=3, eos=tuple(eos))
        assert outcome(proposed) == outcome(plain) and proposed.speculation and proposed.speculation.walks
        for sequence in held:
            runner.release(sequence)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9])
def test_few_tokens_and_a_context_that_ends(path: Path, max_tokens: int) -> None:
    with session(path, ctx=len(PROMPT) + max_tokens, draft_tokens=7) as runner:
        plain = complete(runner)
        assert plain.finish_reason == "length" and len(plain.token_ids) == max_tokens
        for right in (1.0, 0.5):
            assert outcome(complete(runner, Parrot([plain.token_ids], right))) == outcome(plain)
            assert outcome(complete(runner, Parrot([plain.token_ids], right), max_tokens=max_tokens - 1 or 1)) == \
                outcome(complete(runner, max_tokens=max_tokens - 1 or 1))


def test_an_end_token_within_right_draft_tokens(opened: Runner) -> None:
    text = complete(opened).token_ids
    for end in range(2, 12):
        eos = [text[end]]
        plain = complete(opened, eos=eos)
        assert plain.finish_reason == "stop"
        assert outcome(complete(opened, Parrot([text], 1.0), eos=eos)) == outcome(plain)


@pytest.mark.parametrize("text", ["the", ". ", "ily"])
def test_stop_strings_within_right_draft_tokens(text: str) -> None:
    with LLM("demo", threads=1) as llm:
        for temperature in (0.0, 0.9):
            options = {"max_tokens": 60, "temperature": temperature, "seed": 5, "stop": (text,)}
            ids = llm.prompt_ids("Once upon a time")
            plain = llm.complete(ids, speculate="off", **options)
            whole = llm.complete(ids, speculate="off", **{**options, "stop": ()}).token_ids
            request = llm.request(ids, options)
            parrot = Parrot([whole], 1.0, prompt=ids)
            request.task.speculation = Speculation(parrot, Times(), 7, 8, fixed=True)
            proposed = request.finish()
            assert proposed.speculation and proposed.speculation.drafted
            assert (proposed.text, proposed.token_ids, proposed.finish_reason) == \
                (plain.text, plain.token_ids, plain.finish_reason)
            again = llm.stream(ids, reuse=True, **options)
            assert "".join(again) == plain.text


def test_cancelled_at_any_time_nothing_is_lost(opened: Runner) -> None:
    text = complete(opened).token_ids
    free = free_blocks(opened)
    for stop in range(6):
        request = Generation(opened, None, PROMPT, GenerationConfig(max_tokens=40, seed=11), (),
                             Speculation(Parrot([text], 0.8), Times(), 5, opened.config.outputs, fixed=True))
        one = Stepped(request, opened)
        one.read()
        for _ in range(stop):
            one.step()
        result = one.cancel()
        assert result.finish_reason == "cancelled" and result.token_ids == text[: len(result.token_ids)]
        assert len(result.token_ids) > stop
        assert free_blocks(opened) == free


def test_a_drafter_that_is_cancelled_ends_the_request(opened: Runner) -> None:
    class Late(Parrot):
        def propose(self, texts: Items[Any], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
            assert cancel and not cancel.asked
            request.cancel()
            assert cancel.asked
            raise CancelledError("cancelled while drafting")

    drafter, free = Late([()], 1.0), free_blocks(opened)
    request = Generation(opened, None, PROMPT, GenerationConfig(max_tokens=40, seed=11), (),
                         Speculation(drafter, Times(), 7, opened.config.outputs, fixed=True))
    found = run_alone(request, opened)
    assert found.finish_reason == "cancelled" and len(found.token_ids) == 1 and drafter.released == 1
    assert free_blocks(opened) == free


def test_requests_that_run_together_draft_together(path: Path) -> None:
    """They share one controller, and each has its own figures."""
    config, prompts = GenerationConfig(max_tokens=40, seed=11), (PROMPT, PROMPT[:15])
    with session(path, max_sequences=2, draft_tokens=3) as runner:
        plain = [run_alone(Generation(runner, None, prompt, config), runner) for prompt in prompts]
        texts = [[*prompt[15:], *found.token_ids] for prompt, found in zip(prompts, plain, strict=True)]
        parrot, times = Parrot(texts, 0.8, prompt=PROMPT[:15]), Times()
        engine, tasks = Engine(runner), [
            Generation(runner, None, prompt, config, (), Speculation(parrot, times, 3, runner.config.outputs,
                                                                     fixed=True)) for prompt in prompts]
        requests = [Request(engine, task) for task in tasks]
        for request in requests:
            request.start_whole()
        found = [request.finish() for request in requests]
        engine.close()
    assert [outcome(one) for one in found] == [outcome(one) for one in plain]
    assert tasks[0].speculation is tasks[1].speculation
    for report in (one.speculation for one in found):
        assert report and 0 < report.accepted < 40 and report.accepted == sum(report.accepted_per_position)
        assert report.accepted <= report.drafted <= 3 * report.walks


def test_rows_for_draft_tokens_are_planned() -> None:
    for sequences, proposals, rows in ((1, 0, 1), (1, 7, 8), (3, 7, 16), (64, 7, 64), (1, 64, 65), (2, 1, 4)):
        config = resolve(RuntimeConfig(max_sequences=sequences, draft_tokens=proposals), TINY)
        assert config.outputs == rows and to_request(config).tokens >= rows


def test_requests_choose_within_what_was_opened() -> None:
    with LLM("demo", threads=1, draft_tokens=3) as llm:
        assert llm.complete("Once", max_tokens=8).speculation is not None
        assert llm.complete("Once", max_tokens=8, speculate="off").speculation is None
        with pytest.raises(RequestError, match="draft_tokens=5"):
            llm.complete("Once", draft_tokens=5)
    with LLM("demo", threads=1, speculate="off") as llm:
        assert llm.complete("Once", max_tokens=8).speculation is None
        with pytest.raises(RequestError, match=r"^speculate is 'lookup', and the model was opened with .*'off'"):
            llm.complete("Once", speculate="lookup")
