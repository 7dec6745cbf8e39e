"""Draft tokens never change a text: whoever drafts, however well, whatever is sampled; and the controller's
arithmetic.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import (
    Completion,
    Drafter,
    Engine,
    Generation,
    PromptLookup,
    Request,
    Sampler,
    Speculation,
    SpeculationReport,
    Times,
    run_alone,
)
from edgeinfer.engine.speculation import controller as controller
from edgeinfer.engine.speculation.prompt_lookup import LENGTHS, SIZES, Index
from edgeinfer.engine.speculation.usage import Usage
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
            propose = [*whole[at : at + n], *(0,) * (at + n - len(whole))]  # behind the end it draft tokens as well
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
    """Whether two outcomes are the same: to the last bit with our kernels, log-probabilities to 1e-4 with others."""
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
    for proposals in (1, 2, 3, 5, 7):
        for right in (1.0, 0.6, 0.0):
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
    """Texts that end in time need fewer blocks than the draft tokens behind their ends would."""
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


# -- prompt lookup -----------------------------------------------------------------------------------------------------


def naive(text: list[int]) -> tuple[int, list[int]]:
    """Latest earlier place of as many last tokens as SIZES says, and all that follows it, by looking everywhere."""
    for size in SIZES:
        for place in range(len(text) - 2, size - 2, -1):
            if text[place - size + 1 : place + 1] == text[len(text) - size :]:
                common = next((i for i in range(place + 1) if text[place - i] != text[-1 - i]), place + 1)
                return sum(common >= length for length in LENGTHS), text[place + 1 :]
    return 0, []


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_lookup_finds_the_latest_occurrence(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(3)]
    index = Index(text)
    for _ in range(600):
        text.extend(rng.randrange(vocabulary) for _ in range(rng.choice((1, 1, 1, 2, 7))))
        level, following = naive(text)
        assert index.level() == level
        if level:
            assert index.continuation(9)[: len(following)] == following[:9]


def test_lookup_of_more_tokens_than_characters_draft_tokens_and_is_no_error() -> None:
    text = [1 << 21, 5, 1 << 30, 7, 0xD800, 3, 1 << 21, 5]  # beyond Unicode, and half of a surrogate pair
    index = Index(text)
    assert index.level() == 1 and index.continuation(3) == [1 << 30, 7, 0xD800]


def test_lookup_repeats_a_period() -> None:
    text = [1, 2, 3] * 3
    index = Index(text)
    assert index.level() == sum(length <= 6 for length in LENGTHS)
    assert index.continuation(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert Index([5]).level() == 0 and Index([5, 5]).level() == 0 and Index([5, 5, 5]).continuation(1) != []


# -- the controller ----------------------------------------------------------------------------------------------------


class Clock:
    """A runner and a drafter of given speeds and accuracy, as the controller sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forward: Callable[[int], float], right: float,
                 free: bool = False,
                 draft: float = 0.0, samples: int = 1, steps: int = 1, noise: float = 0.0, seed: int = 1,
                 asked: bool | None = None, times: Times | None = None):
        self.now, self.forward, self.right, self.draft = 0.0, forward, right, draft
        self.steps, self.noise, self.instead = steps, noise, 0.0
        self.random = random.Random(seed)
        monkeypatch.setattr(controller.time, "perf_counter", lambda: self.now)
        clock = self

        class Proposer(Drafter):
            name = "draft"

            def propose(self, texts: Items[Any], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
                clock.now += n * clock.draft
                return [[_next(text.tokens, i) if clock.random.random() < clock.right else -1 for i in range(n)]
                        for text in texts]

            def release(self, texts: Items[Any]) -> None:
                pass

        Proposer.free = free
        self.speculation = Speculation(Proposer(), times or Times(), 7, 64,
                                       asked=not free if asked is None else asked)
        self.usage = Usage()
        self.texts = [_Text(key, self.usage) for key in range(samples)]

    def report(self) -> SpeculationReport:
        """Return the figures of the request."""
        return self.speculation.report(self.usage)

    def passed(self, seconds: float) -> None:
        """Let a pass take so long, and now and then longer: others disturb it."""
        self.now += seconds * (1 + self.noise * self.random.expovariate(1.0))

    def run(self, steps: int) -> list[int]:
        """Decode; returns how many draft tokens each forward pass checked."""
        counts = []
        for _ in range(steps):
            proposals = self.speculation.proposals(self.texts, 1000)
            counts.append(max(map(len, proposals), default=0))
            if not proposals:
                self.passed(self.steps * self.forward(len(self.texts)))
                for text in self.texts:
                    for _ in range(self.steps):
                        text.tokens.append(_next(text.tokens))
                self.speculation.plain(self.steps)
                continue
            self.passed(self.forward(len(self.texts) + sum(map(len, proposals))))
            accepted = [next((i for i, token in enumerate(propose) if token != _next(text.tokens, i)), len(propose))
                        for text, propose in zip(self.texts, proposals, strict=True)]
            for text, right in zip(self.texts, accepted, strict=True):
                for _ in range(right + 1):
                    text.tokens.append(_next(text.tokens))
            self.speculation.verified(proposals, accepted)
        return counts


class _Text:
    def __init__(self, key: int, usage: Usage):
        self.key, self.usage, self.tokens = key, usage, [0]


def _next(text: list[int], ahead: int = 0) -> int:
    return len(text) + ahead


def test_it_samples_many_draft_tokens_where_they_are_right_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda n: 1 + 0.05 * (n - 1), right=0.95)
    counts = clock.run(200)
    assert np.median(counts[50:]) == 7
    report = clock.report()
    expected = sum(0.95**i for i in range(8)) / 1.35
    assert report.state == "on" and report.gain == pytest.approx(expected, rel=0.1)
    assert report.tokens_per_walk == pytest.approx(sum(0.95**i for i in range(8)), rel=0.1)
    assert report.accepted == sum(report.accepted_per_position) and report.walks <= 200


def test_it_stops_where_passes_cost_as_much_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for right, forward, draft in ((0.9, lambda n: n, 0.0), (0.2, lambda n: 1 + 0.3 * (n - 1), 0.0),
                               (0.8, lambda n: 1 + 0.05 * (n - 1), 0.9)):
        clock = Clock(monkeypatch, forward, right, draft=draft)
        counts = clock.run(3000)
        report = clock.report()
        assert report.state == "off" and report.gain and report.gain > 0.97
        tried = [i for i, n in enumerate(counts) if n]
        assert len(tried) < 35 and np.diff(tried)[-1] > 8 * np.diff(tried).min()


def test_free_draft_tokens_are_judged_without_being_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda n: 1 + 0.3 * (n - 1), right=0.0, free=True)
    assert np.count_nonzero(clock.run(400)) < 8
    clock.right = 1.0  # now the text repeats itself: nothing is checked, and yet it is seen
    assert np.count_nonzero(clock.run(60)) > 10


def test_reading_a_prompt_is_no_part_of_what_draft_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda n: 1 + 0.05 * (n - 1), right=0.95, draft=0.02)
    drafter, unread = clock.speculation.drafter, [100.0]
    propose = drafter.propose

    def catch_up(texts: Items[Any], cancel: Cancellation | None = None) -> None:
        clock.now += unread.pop() if unread else 0

    def reading(texts: Items[Any], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        catch_up(texts)
        return propose(texts, n, cancel)

    monkeypatch.setattr(drafter, "catch_up", catch_up)
    monkeypatch.setattr(drafter, "propose", reading)
    assert np.median(clock.run(60)[10:]) == 7
    report = clock.report()
    assert report.gain and report.gain < 3  # but the text was as much later


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("right", "python"), [(0.0, 0.5), (0.3, 0.5), (0.6, 1.0), (0.5, 3.0), (0.95, 3.0)])
def test_tries_that_fail_cost_two_hundredths_at_most(monkeypatch: pytest.MonkeyPatch, right: float, python: float,
                                                     free: bool, steps: int) -> None:
    """Runs of 20 to 256 tokens of a model of 2 ms a token, each in a process of its own."""
    for length in (20, 64, 256):
        lost = []
        for seed in range(12):
            clock = Clock(monkeypatch, lambda n: 2e-3 * (1 if n == 1 else python + 0.3 * n), right, free,
                          0.0 if free else 5e-4, steps=steps, noise=0.05, seed=seed, asked=False)
            while len(clock.texts[0].tokens) <= length:
                clock.run(1)
            lost.append(clock.now / (2e-3 * 1.05 * (len(clock.texts[0].tokens) - 1)) - 1)
        assert np.mean(lost) < 0.02 + 0.05 / np.sqrt(12 * length / steps)  # the noise of a mean


@pytest.mark.parametrize("asked", [False, True])
def test_several_steps_in_a_pass_are_what_it_is_compared_with(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """A pass that verifies gives 2.4 times the tokens of a single step with Python's part, and fewer than 16 steps."""
    times, step, stated, measured = Times(), 1e-3, [], []
    for seed in range(6):
        clock = Clock(monkeypatch, lambda n: step if n == 1 else 6 * step, 0.8, True, steps=16, noise=0.02, seed=seed,
                      asked=asked, times=times)
        counts = clock.run(60)
        report = clock.report()
        measured.append(step * 1.02 * (len(clock.texts[0].tokens) - 1) / clock.now)
        stated.append(1.0 if report.gain is None else report.gain)
        assert np.count_nonzero(counts[20:]) < 4
    assert min(measured) > 0.97 and stated == pytest.approx(measured, rel=0.05)


def test_models_whose_tokens_take_next_to_nothing_do_not_draft_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times()
    for asked, drafts in ((False, False), (True, True)):
        clock = Clock(monkeypatch, lambda n: 2e-4 if n == 1 else 3e-4, 1.0, True, steps=16, asked=asked, times=times)
        assert any(clock.run(40)) == drafts
        assert clock.report().state == ("on" if drafts else "idle") and clock.speculation.idle != drafts


def test_one_undisturbed_pass_shows_that_tokens_take_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of disturbed passes does not; and a later request looks once."""
    times, seconds = Times(), iter([9e-4, 2e-4])
    clock = Clock(monkeypatch, lambda n: next(seconds), 1.0, True, steps=16, asked=False, times=times)
    clock.run(2)
    assert clock.speculation.idle
    later = Clock(monkeypatch, lambda n: 9e-4, 1.0, True, steps=16, asked=False, times=times)
    assert not later.speculation.proposals(later.texts, 1000) and later.speculation.idle


@pytest.mark.parametrize("right", [0.5, 0.75, 0.95])
@pytest.mark.parametrize("deep", [0.0, 2e-7])
def test_the_stated_gain_is_the_measured_one(monkeypatch: pytest.MonkeyPatch, right: float, deep: float) -> None:
    """Also where a token takes longer the more there are before it, and others disturb."""
    times = Times()
    for seed in range(4):
        clock = Clock(monkeypatch, lambda n: 2e-3, right, noise=0.03, seed=seed, draft=1e-4, times=times)
        clock.forward = lambda n, own=clock: (2e-3 + deep * len(own.texts[0].tokens)) * (1 + 0.1 * (n - 1))
        clock.run(150)
        tokens = len(clock.texts[0].tokens) - 1
        instead = sum(2e-3 + deep * depth for depth in range(1, tokens + 1)) * 1.03
        assert clock.report().gain == pytest.approx(instead / clock.now, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_clocks_that_stand_still_or_go_back(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = Clock(monkeypatch, lambda n: seconds, right=0.9)
    clock.run(100)
    report = clock.report()
    assert report.walks <= 100 and not (report.gain and report.gain <= 0)


def test_draft_tokens_retire_where_sequences_fill_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = lambda n: max(1.0, n / 8)  # noqa: E731
    for samples, proposals in ((1, True), (8, False)):
        clock = Clock(monkeypatch, curve, right=0.7, samples=samples)
        counts = clock.run(300)
        assert (np.mean(np.array(counts[50:]) > 0) > 0.9) == proposals
        assert (clock.report().state == "on") == proposals


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


# -- samples of checked rows -------------------------------------------------------------------------------------------

SAMPLES = int(os.environ.get("EDGEINFER_SAMPLES", "800"))
"""Per setting; CI has no time for 100,000."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"logit_bias": {3: 1.0, 5: -2.0}},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05}])
def test_samples_of_checked_rows_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square against the sampler's own distribution; a draft with other logits draft tokens with the same
    numbers.
    """
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal(12) * 1.3).astype(np.float32)
    others = logits + rng.standard_normal(12).astype(np.float32) / 2
    config = GenerationConfig(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
    chain, sampled, right = Sampler(config, 12, seed=9, room=SAMPLES + 8), list[int](), 0
    ids, probabilities = chain.distribution(logits)
    while len(sampled) < SAMPLES:
        draft, propose = chain.for_draft(12, 3), list[int]()
        for _ in range(3):
            propose.append(draft.sample(others).token_id)
            draft.accept(propose[-1])
        for place, row in enumerate(chain.following(propose)):
            sampled.append(row.sample(logits).token_id)
            chain.accept(sampled[-1])
            if propose[place : place + 1] != sampled[-1:]:
                break
            right += 1
    expected = probabilities * len(sampled)
    seen = np.bincount(sampled, minlength=12)
    chi_square, freedom = ((seen[ids] - expected) ** 2 / expected).sum(), len(ids) - 1
    assert seen[ids].sum() == len(sampled) and chi_square < freedom + 4 * np.sqrt(2 * max(freedom, 1))
    assert right > 0.3 * len(sampled)
    plain, text = Sampler(config, 12, seed=9, room=SAMPLES + 8), list[int]()
    for _ in sampled:
        text.append(plain.sample(logits).token_id)
        plain.accept(text[-1])
    assert text == sampled
