"""Play the engine's schedule through with estimated times, as ``bench --concurrency`` plays it with measured ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import sqrt
from random import Random
from typing import NamedTuple

from ...base.dataclass import dataclass
from ...config import RuntimeConfig
from ...engine import MAX_ITL, TokenBudget, urgency

ROUNDS = 4
"""Requests of each user, as many as ``bench --concurrency`` sends by default."""
PLAYS, JITTER = 5, 0.1
"""Plays whose medians count, and the standard deviation of a step's time in them as a share of it. How prompts are cut
into chunks, and with it TTFT, depends on which step an answer ends in: a single play without deviations always falls
into the same gaps, runs do not (docs/measurements/estimator.md)."""
MANY = 1 << 30
"""More steps than any."""
CHUNK: int = RuntimeConfig.prefill_chunk
StepMs = Callable[[int, int, int], float]
"""Milliseconds of a step by its decoding sequences, its tokens of a prompt, and those of the prompt before them."""


@dataclass(frozen=True)
class Served:
    """Times of one request in milliseconds, from its arrival."""

    arrived: float
    ttft: float
    e2el: float

    def tpot(self, answer: int) -> float:
        """Return the time per token after the first."""
        return (self.e2el - self.ttft) / max(answer - 1, 1)


class _Prompt(NamedTuple):
    """A request whose prompt is not computed to its end; the most urgent is the least."""

    urgency: float
    """Rank at time 0; between two prompts it differs by as much at any time."""
    arrived: float
    left: int
    """Tokens of the prompt that are not computed."""


def _prompt(arrived: float, left: int) -> _Prompt:
    return _Prompt(urgency(left, -arrived / 1000), arrived, left)


class _Decoding(NamedTuple):
    """A request that gets tokens."""

    last: int
    """Number of the step that gives it the last one."""
    arrived: float
    first: float
    """Time of the first token."""


class _Play:
    """Users, requests and clock of a schedule."""

    def __init__(self, step_ms: StepMs, users: int, prompt: int, answer: int, rounds: int, chance: Random | None):
        self._step_ms, self._prompt, self._answer = step_ms, prompt, answer
        self._budget, self._now, self._unsent = TokenBudget(MAX_ITL, CHUNK), 0.0, users * (rounds - 1)
        self._arriving, self._prompts = deque([0.0] * users), list[_Prompt]()
        self._steps, self._decoding, self._chance = 0, deque[_Decoding](), chance

    def run(self) -> Iterator[Served]:
        """Yield the requests in order of their ends."""
        while self._arriving or self._prompts or self._decoding:
            self._enter()
            chunks, decoding = self._chunks(), len(self._decoding)
            steps = self._repeated(chunks)
            took = self._took(chunks, decoding) * self._deviation(steps)
            self._steps, self._now = self._steps + steps, self._now + took * steps
            self._budget.took(decoding, sum(tokens for tokens, _ in chunks), took / 1000)
            self._compute(chunks, steps)
            yield from self._ended()

    def _enter(self) -> None:
        """Let requests in that have arrived before this step; the first one calls an idle engine."""
        while self._arriving and (self._arriving[0] < self._now or not (self._prompts or self._decoding)):
            heappush(self._prompts, _prompt(self._arriving.popleft(), self._prompt))

    def _chunks(self) -> list[tuple[int, _Prompt]]:
        """Take the prompts of the next step, and return their tokens."""
        decoding = len(self._decoding)
        room = min(self._budget.prompt_tokens(decoding), max(CHUNK - decoding, 1))
        chunks = []
        while room and self._prompts:
            one = heappop(self._prompts)
            chunks.append((min(one.left, room), one))
            room -= chunks[-1][0]
        return chunks

    def _repeated(self, chunks: list[tuple[int, _Prompt]]) -> int:
        """Return how many steps are alike: until an answer ends, and of a long prompt a few at once."""
        until = self._decoding[0].last - self._steps if self._decoding else MANY
        if self._arriving or len(chunks) > 1:
            return 1
        return min(until, max(1, chunks[0][1].left // chunks[0][0] // 16)) if chunks else until

    def _took(self, chunks: list[tuple[int, _Prompt]], decoding: int) -> float:
        tokens = sum(tokens for tokens, _ in chunks)
        return self._step_ms(decoding, tokens, self._prompt - chunks[0][1].left if chunks else 0)

    def _deviation(self, steps: int) -> float:
        """Return a factor for the mean time of so many steps."""
        return self._chance.lognormvariate(0, JITTER / sqrt(steps)) if self._chance else 1.0

    def _compute(self, chunks: list[tuple[int, _Prompt]], steps: int) -> None:
        """Take the tokens of prompts that were computed; a prompt that is done decodes."""
        for tokens, one in chunks:
            if tokens * steps < one.left:
                heappush(self._prompts, _prompt(one.arrived, one.left - tokens * steps))
            else:
                self._decoding.append(_Decoding(self._steps + self._answer - 1, one.arrived, self._now))

    def _ended(self) -> Iterator[Served]:
        """Yield the requests that have all their tokens; their users ask again."""
        while self._decoding and self._decoding[0].last <= self._steps:
            one = self._decoding.popleft()
            if self._unsent:
                self._arriving.append(self._now)
                self._unsent -= 1
            yield Served(one.arrived, one.first - one.arrived, self._now - one.arrived)


def plays(step_ms: StepMs, users: int, prompt: int, answer: int) -> list[list[Served]]:
    """Return several plays, in which the times of steps deviate; a single user has one, without deviations."""
    return [play(step_ms, users, prompt, answer, chance=Random(seed) if users > 1 else None)
            for seed in range(PLAYS if users > 1 else 1)]


def play(step_ms: StepMs, users: int, prompt: int, answer: int, rounds: int = ROUNDS, chance: Random | None = None
         ) -> list[Served]:
    """Return the requests of users who all ask at once, and again whenever they are answered, in order of their ends.

    A step takes all that decode, and of the prompts as many tokens as the engine's `TokenBudget` allows, the most
    urgent first. A request that arrives while a step begins enters with the next one.

    Parameters
    ----------
    step_ms : time of a step
    users : who ask at the same time
    prompt, answer : tokens of a request
    rounds : requests of each user
    chance : source of deviations from these times; without it there are none
    """
    return list(_Play(step_ms, users, prompt, answer, rounds, chance).run())
