"""Masked samples in forward passes of every kind: within the pass and in NumPy, one step at a time, with draft tokens
and beams, and of a runner that leaves rows out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import BeamSearch, Completion, Generation, PromptLookup, Sampler, Speculation, Times, run_alone
from edgeinfer.engine.beams import log_probabilities
from edgeinfer.engine.sampler import EMPTY
from edgeinfer.kernels import abi
from edgeinfer.runner import Runner
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, running, session, tokens, write_model

VOCABULARY = 3000
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 0, "min_p": 0.0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_k": 200},
    {"repetition_penalty": 1.3, "presence_penalty": 0.3, "logit_bias": {5: 2.0, 7: -100.0}, "logprobs": 1},
)  # fmt: skip


def mask_of(allowed: Any) -> np.ndarray:
    bits = np.zeros(-(-VOCABULARY // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


PARITY = [mask_of(range(first, VOCABULARY, 2)) for first in (0, 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("masks"), replace(TINY, vocab_size=VOCABULARY))


@pytest.fixture(scope="module", params=["cpu", "onnx-cpu"])
def opened(path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    with running(path, request.param, max_sequences=3, threads=1, draft_tokens=7) as one:
        yield one


@pytest.fixture
def ours(path: Path) -> Iterator[Session]:
    with session(path, max_sequences=3, threads=2) as one:
        yield one


def alternating(runner: Runner, in_numpy: bool, **options: Any) -> list[tuple[int, Any]]:
    """A text whose tokens are even and odd in turns, written token by token; each is chosen in the pass or in NumPy."""
    chain, sequence, text = Sampler(GenerationConfig(**options), VOCABULARY, 3, room=99), runner.new_sequence(), []
    prompt = tokens(9)
    chain.prompt(prompt)
    chain.set_mask(PARITY[0])
    row = runner.prefill(sequence, prompt, None, 0 if in_numpy else chain.address)
    for number in range(12):
        sampled = chain.sample(row)
        text.append((sampled.token_id, sampled.logprob))
        assert sampled.token_id % 2 == number % 2
        chain.accept(sampled.token_id)
        chain.set_mask(PARITY[1 - number % 2])
        row = runner.decode([sequence], [sampled.token_id], None, [] if in_numpy else [chain.address], 5)[0]
        assert len(sequence) == 10 + number, "no step without its mask"
    runner.release(sequence)
    return text


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_same_text_in_the_pass_and_in_numpy(opened: Runner, options: dict[str, Any]) -> None:
    assert alternating(opened, in_numpy=False, **options) == alternating(opened, in_numpy=True, **options)


def test_the_pass_chooses_and_one_masked_row_keeps_all_to_one_step(ours: Session, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    monkeypatch.setattr(ours.executor.tuner, "further", lambda tokens, stop: abi.MAX_STEPS - 1)
    chains = [Sampler(GenerationConfig(), VOCABULARY, seed, room=99) for seed in range(3)]
    sequences = [ours.new_sequence() for _ in chains]
    for sequence in sequences:
        ours.prefill(sequence, tokens(5))
    specs = [chain.address for chain in chains]
    chains[1].set_mask(PARITY[1])
    rows = ours.decode(sequences, [1, 2, 3], None, specs, 4)
    monkeypatch.setattr(Sampler, "_sample", None)  # every token was chosen in the pass
    assert [len(sequence) for sequence in sequences] == [6, 6, 6]
    assert [chain.sample(row).token_id % 2 for chain, row in zip(chains, rows, strict=True)][1] == 1
    chains[1].set_mask(None)
    ours.decode(sequences, [1, 2, 3], None, specs, 4)
    assert [len(sequence) for sequence in sequences] == [11, 11, 11]


def test_what_a_mask_leaves_nothing_of_goes_on_as_if_nothing_had_happened(opened: Runner) -> None:
    sequence, chain = opened.new_sequence(), Sampler(GenerationConfig(temperature=0.0), VOCABULARY, 1)
    row = opened.prefill(sequence, [1, 2], None, chain.address)
    chain.sample(row)
    chain.set_mask(mask_of([]))
    assert chain.sample(opened.decode([sequence], [3], None, [chain.address])[0]) == (EMPTY, None, ())
    opened.truncate(sequence, 2)
    chain.set_mask(None)
    row = opened.decode([sequence], [3])[0]
    opened.truncate(sequence, 2)
    want = int(row.argmax())
    assert chain.sample(opened.decode([sequence], [3], None, [chain.address])[0]).token_id == want
    opened.release(sequence)


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose tokens are all odd."""
    make = Generation.sampler

    def odd(request: Generation, index: int) -> Sampler:
        chain = make(request, index)
        chain.set_mask(PARITY[1])
        return chain

    monkeypatch.setattr(Generation, "sampler", odd)


def complete(runner: Runner, speculation: Speculation | None = None, **options: Any) -> Completion:
    config = GenerationConfig(max_tokens=30, seed=2, **options)
    return run_alone(Generation(runner, None, tokens(21), config, (), speculation), runner)


@pytest.mark.slow(keep=6)
@pytest.mark.usefixtures("masked")
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_draft_tokens_are_checked_under_masks(opened: Runner, options: dict[str, Any]) -> None:
    plain = complete(opened, n=3, **options)
    drafted = complete(opened, Speculation(PromptLookup(), Times(), 5, opened.config.outputs, fixed=True), n=3,
                       **options)
    ids = [choice.token_ids for choice in plain.choices]
    assert [choice.token_ids for choice in drafted.choices] == ids
    assert all(token % 2 for text in ids for token in text)


@pytest.mark.usefixtures("masked")
def test_beams_keep_to_their_masks_and_to_the_models_own_probabilities(ours: Session) -> None:
    config = GenerationConfig(max_tokens=4, beams=3, n=3)
    for choice in run_alone(BeamSearch(ours, None, tokens(9), config), ours).choices:
        assert all(token % 2 for token in choice.token_ids) and len(choice.token_ids) == 4
        sequence = ours.new_sequence()
        rows = [ours.prefill(sequence, tokens(9)).copy()]
        rows += [ours.decode([sequence], [token])[0].copy() for token in choice.token_ids[:-1]]
        total = sum(float(log_probabilities(row, np.array([token]))[0])
                    for row, token in zip(rows, choice.token_ids, strict=True))
        assert choice.score == pytest.approx(total / 4)
        ours.release(sequence)
