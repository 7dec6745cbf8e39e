"""The controller drafts as many tokens as pay, by a clock of given speeds and accuracy."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import pytest

from edgeinfer.engine import Drafter, Speculation, SpeculationReport, Times
from edgeinfer.engine.speculation import controller
from edgeinfer.engine.speculation.usage import Usage
from edgeinfer.runner import Cancellation


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
