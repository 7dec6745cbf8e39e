"""Requests of all kinds, with their results alone and together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from edgeinfer.runner import Runner
from edgeinfer.text import Constraint, GrammarCompiler, Tokenizer
from tests.helpers.sessions import free_blocks, tokens
from tests.helpers.tasks import held

COMMON = tokens(70, 8)
"""Beginning that a half of the prompts share."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}


class Asked(NamedTuple):
    """A request of the test."""

    ids: list[int]
    config: GenerationConfig
    scored: tuple[tuple[int, ...], ...] = ()
    """Continuations to score instead."""


def asked_for(n: int, seed: int, beams: bool = True, grammars: bool = False, longest: int = 170) -> list[Asked]:
    """Return requests of all kinds; with `grammars` some follow a schema, and each 20th has a prompt of `longest`."""
    chance, found = random.Random(seed), []
    for number in range(n):
        ids = COMMON[: chance.choice((0, 16, 40, 70))] + tokens(chance.choice((1, 3, 9, 30, 100)), number)
        options: dict[str, Any] = {
            "max_tokens": chance.choice((1, 2, 20, 60, 110, 150)), "seed": number,
            "temperature": chance.choice((0.0, 0.9)),
            "repetition_penalty": chance.choice((1.0, 1.2)), "frequency_penalty": chance.choice((0.0, 0.4)),
            "logprobs": chance.choice((None, None, 0, 3)), "n": chance.choice((1, 1, 1, 2)),
            "ignore_eos": chance.random() < 0.7,
        }
        if number % 20 == 19:
            ids, options["n"] = tokens(longest, number), 1
        if grammars and number % 5 == 2:
            options["response_format"] = SCHEMA
        if beams and number % 9 == 4:
            options = {"beams": 2, "n": 2, "max_tokens": 12, "logprobs": options["logprobs"]}
        scored = tuple(tuple(tokens(chance.choice((1, 4, 9)), 10 + i)) for i in range(3)) if number % 11 == 7 else ()
        found.append(Asked(ids, GenerationConfig(**options), scored))
    return found


def compiler_of(runner: Runner) -> GrammarCompiler:
    """Return a compiler of grammars for a model with a tokenizer."""
    tokenizer = Tokenizer.of_model(runner.bundle.path, runner.bundle.files, runner.model)
    assert tokenizer
    return GrammarCompiler(tokenizer, runner.model.vocab_size, [2])


def task_of(runner: Runner, asked: Asked, speculation: Speculation | None = None,
            grammars: GrammarCompiler | None = None) -> Any:
    """Return the engine's task for a request."""
    form, begin = asked.config.response_format, None
    if asked.scored:
        return Scoring(runner, asked.ids, [(None, ids) for ids in asked.scored])
    if asked.config.beams > 1:
        return BeamSearch(runner, None, asked.ids, asked.config, (5,))
    if form is not None:
        assert grammars

        def begin_form() -> Constraint:
            return grammars.begin(form)

        begin = begin_form
    return Generation(runner, None, asked.ids, asked.config, (5,) if begin is None else (2,), speculation, begin)


def outcome(found: Any) -> Any:
    """Return the invariant part of a result: tokens, log-probabilities and finish reasons."""
    if isinstance(found, list):
        return [(score.token_ids, score.logprobs, score.greedy) for score in found]
    return [(choice.token_ids, choice.finish_reason, choice.score,
             [(one.token_id, one.logprob, one.top) for one in choice.logprobs or ()]) for choice in found.choices]


@contextmanager
def engine_of(runner: Runner, **options: Any) -> Iterator[Engine]:
    """An engine whose runner outlives it: blocks are counted after its end."""
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


def each_alone(runner: Runner, requests: list[Asked], grammars: GrammarCompiler | None = None) -> list[Any]:
    """Return the results of requests that run one after the other."""
    return [outcome(run_alone(task_of(runner, one, grammars=grammars), runner)) for one in requests]


def together(engine: Engine, requests: list[Asked], reuse: bool, speculate: bool, seed: int = 0,
             grammars: GrammarCompiler | None = None) -> list[Any]:
    """Return the results of requests that arrive in any order, while others run."""
    order, times = list(range(len(requests))), Times()
    random.Random(seed).shuffle(order)
    made: dict[int, Request[Any]] = {}
    with held(engine, after=4):  # a crowd, also where this thread is late
        for number in order:
            speculation = Speculation(PromptLookup(), times, 3, 8, asked=True) if speculate else None
            made[number] = Request(engine, task_of(engine.runner, requests[number], speculation, grammars), reuse)
            made[number].start_whole()
    return [outcome(made[number].finish()) for number in range(len(requests))]
