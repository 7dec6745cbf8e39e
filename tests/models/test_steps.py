"""Forward passes of several steps: the same text, tokens and KV as one pass a token, wherever a text or a block
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Generation, Sampler, run_alone
from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.kernels import abi
from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Session
from edgeinfer.runtime.execution.thread_tuner import ThreadTuner
from tests.helpers.sessions import SPLIT, TINY, session, tokens, write_model

CTX = SPLIT + 64
MOST = abi.MAX_STEPS - 1


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = write_model(tmp_path_factory.mktemp("steps"), replace(TINY, vocab_size=600))
    with session(path, max_sequences=3, threads=2, ctx=CTX) as running:
        yield running


@pytest.fixture
def passes(opened: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Always as many steps as there may be; the steps of each forward pass."""
    taken: list[int] = []
    run = opened.executor.run

    def counted(first: int = 0, stop: int | None = None, cancel: Any = None, further: int = 0) -> None:
        run(first, stop, cancel, further)
        taken.append(1 + further - opened.executor.steps_left)

    monkeypatch.setattr(opened.executor.tuner, "further", lambda tokens, stop: MOST)
    monkeypatch.setattr(opened.executor, "run", counted)
    return taken


def generated(opened: Session, prompt: list[int], ends: tuple[int, ...] = (), **options: Any) -> Generation:
    request = Generation(opened, None, prompt, GenerationConfig(**{"seed": 4, "max_tokens": 60, **options}), ends)
    run_alone(request, opened)
    return request


def both(opened: Session, monkeypatch: pytest.MonkeyPatch, prompt: list[int], ends: tuple[int, ...] = (),
         **options: Any) -> tuple[Generation, Generation]:
    """The same request in forward passes of several steps, and in forward passes of one."""
    several = generated(opened, prompt, ends, **options)
    with monkeypatch.context() as patch:
        patch.setattr(opened.executor.tuner, "further", lambda tokens, stop: 0)
        single = generated(opened, prompt, ends, **options)
    return several, single


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.0}, {"n": 3}, {"max_tokens": 1}, {"max_tokens": 18}, {"repetition_penalty": 1.4},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"frequency_penalty": 0.7, "logit_bias": {9: 3.0, 11: -4.0}},
    {"presence_penalty": 0.9}, {"logprobs": 2}, {"logit_bias": {9: 3.0}},
    {"temperature": 0.0, "repetition_penalty": 1.8, "n": 2},
])
def test_same_text(opened: Session, passes: list[int], monkeypatch: pytest.MonkeyPatch,
                   options: dict[str, Any]) -> None:
    several, single = both(opened, monkeypatch, tokens(9), **options)
    for ours, theirs in zip(several.result().choices, single.result().choices, strict=True):
        assert ours == theirs and ours.finish_reason == "length"
    times = several.token_times
    assert len(times) == 1 + len(several.result().token_ids) and all(map(float.__lt__, times, times[1:]))
    alone = "logprobs" in options or options.get("top_k") == 0
    assert alone or options.get("max_tokens") == 1 or max(passes) > 8


def test_up_to_splits_and_to_the_end_of_the_context(
    opened: Session, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass never crosses the row from which on attention is split, nor the context."""
    several, single = both(opened, monkeypatch, tokens(SPLIT - 21), max_tokens=1000)
    assert several.result().choices == single.result().choices
    assert len(several.result().token_ids) == CTX - (SPLIT - 21)
    assert max(passes) == abi.MAX_STEPS and opened.executor.tuner.further(1, 0) == MOST


@pytest.mark.parametrize("end", [3, 17, 20, 40])
def test_a_token_that_ends_the_text(
    opened: Session, passes: list[int], monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    """The forward pass in which it is sampled is the last, and nothing follows it."""
    options = {"temperature": 3.0, "top_k": 100, "top_p": 1.0, "min_p": 0.0, "seed": 8}
    whole = generated(opened, tokens(9), **options)
    ids = whole.result().token_ids
    last = next(token for token in ids[end:] if ids.index(token) >= end)
    passes.clear()
    several, single = both(opened, monkeypatch, tokens(9), (last,), **options)
    assert several.result().choices == single.result().choices
    assert several.result().finish_reason == "stop"
    length = len(several.result().token_ids)
    assert sum(passes[: next(i for i in range(1, len(passes) + 1) if sum(passes[:i]) >= length)]) <= length + 1


def test_sequences_hold_what_was_run(opened: Session, passes: list[int]) -> None:
    """Tokens and KV rows: going on from them gives the bits of a prompt of these tokens."""
    sequence = opened.new_sequence()
    sampler = Sampler(GenerationConfig(temperature=0.7, seed=3), opened.model.vocab_size, 3)
    opened.prefill(sequence, tokens(13))
    opened.decode([sequence], [5], None, [sampler.address], further=9)
    assert len(sequence) == 13 + 1 + 9 and sequence.tokens[13] == 5 and passes[-1] == 10
    assert len(sequence.blocks) == -(-len(sequence) // abi.BLOCK_TOKENS)
    again = opened.new_sequence()
    opened.prefill(again, sequence.tokens)
    assert (opened.decode([sequence], [7])[0] == opened.decode([again], [7])[0].copy()).all()
    for each in (sequence, again):
        opened.release(each)


def test_one_step_where_python_is_needed(opened: Session, passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sample, under the checks of kernels, and where no block is left for more."""
    sequence, sampler = opened.new_sequence(), Sampler(GenerationConfig(), opened.model.vocab_size, 3)
    opened.prefill(sequence, tokens(15))
    opened.decode([sequence], [5], further=9)
    with monkeypatch.context() as patch:
        patch.setattr(opened.executor, "check", True)
        patch.setattr("edgeinfer.runtime.execution.check.run_checked", lambda *arguments: None)
        opened.decode([sequence], [5], None, [sampler.address], further=9)
    taken = [opened.kv.pool.take() for _ in range(opened.kv.pool.n_free)]
    opened.decode([sequence], [5], None, [sampler.address], further=40)
    assert passes[-3:] == [1, 1, 1] and len(sequence) == 18
    for block in taken:
        opened.kv.pool.drop(block)
    opened.release(sequence)


def test_no_more_steps_than_blocks_and_copies(opened: Session, passes: list[int]) -> None:
    """Forks copy the block that they share, which takes blocks too."""
    first, chains = opened.new_sequence(), [Sampler(GenerationConfig(), opened.model.vocab_size, i) for i in range(3)]
    opened.prefill(first, tokens(30))
    forks = [first, opened.fork(first), opened.fork(first)]
    taken = [opened.kv.pool.take() for _ in range(opened.kv.pool.n_free - 4)]
    opened.decode(forks, [5, 6, 7], None, [chain.address for chain in chains], further=9)
    assert passes[-1] == 1 and opened.kv.pool.n_free == 2
    for block in taken:
        opened.kv.pool.drop(block)
    for sequence in forks:
        opened.release(sequence)


def test_steps_are_those_of_their_own_pass(
    opened: Session, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program on the same threads makes ctx its own as soon as the forward pass is over."""
    run, words = opened.executor.run, opened.executor.pool.words

    def run_and_lend(*arguments: Any) -> None:
        run(*arguments)
        words[abi.CTX_STEPS >> 3] = 0

    monkeypatch.setattr(opened.executor, "run", run_and_lend)
    size, sequence = opened.model.vocab_size, opened.new_sequence()
    sampler = Sampler(GenerationConfig(), size, 3, ends=range(size))
    opened.prefill(sequence, tokens(13))
    opened.decode([sequence], [5], None, [sampler.address], further=9)
    assert len(sequence) == 14 and len(passes) == 2
    opened.release(sequence)


def test_what_makes_no_sense_is_refused_as_in_one_step(opened: Session) -> None:
    for further in (0, 9, -1):
        with pytest.raises(RequestError, match="0 sequences with 0 tokens"):
            opened.decode([], [], further=further)
        with pytest.raises(RequestError, match="belongs to another model"):
            opened.decode([None], [3], further=further)  # type: ignore[list-item]


def test_cancelled_passes_leave_nothing(opened: Session, passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, sequence = Cancellation(), opened.new_sequence()
    sampler = Sampler(GenerationConfig(), opened.model.vocab_size, 3)
    opened.prefill(sequence, tokens(15))
    held, ended = list(sequence.blocks), opened.executor.ended
    asked = iter((False, True))
    monkeypatch.setattr(opened.executor, "ended", lambda wish: next(asked, True) or ended(wish))
    with pytest.raises(CancelledError):
        opened.decode([sequence], [5], cancel, [sampler.address], further=12)
    assert len(sequence) == 15 and sequence.blocks == held
    opened.release(sequence)


def test_steps_by_the_time_of_passes() -> None:
    """As many as take no longer than 20 ms together, and none before the time of a forward pass is known."""
    tuner = ThreadTuner(1)
    tuner.plan(1, 0, 50)
    assert tuner.further(1, 50) == 0
    for ns, further in ((25e6, 0), (11e6, 0), (9e6, 1), (3e6, 5), (1e5, MOST)):
        tuner.took(ns, 1, 0, 50)
        assert tuner.further(1, 50) == further
