"""Masks in the sampler: an oracle that forbids the same tokens by logit_bias, drafts, and masks that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine.sampler import EMPTY, Sampled, Sampler, log_softmax
from edgeinfer.engine.speculation.draft_model import sampled
from edgeinfer.errors import KernelError, RequestError

SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 3}, {"top_k": 0, "top_p": 0.8, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3})
SIZES = (1, 31, 32, 33, 500)


def mask_of(allowed: Any, size: int) -> np.ndarray:
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def sampler(size: int, seed: int = 1, **options: Any) -> Sampler:
    chain = Sampler(GenerationConfig(**options), size, seed, room=200)
    chain.prompt([0, size // 2])
    return chain


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_mask_is_a_bias_of_minus_infinity(size: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(size)
    for seed in range(40):
        logits = rng.normal(0, 3, size).astype(np.float32)
        allowed = {size - 1} | set(np.flatnonzero(rng.random(size) < (0.05, 0.5, 0.97)[seed % 3]).tolist())
        masked = sampler(size, seed, **options)
        masked.set_mask(mask_of(allowed, size).view((np.int32, np.uint32)[seed % 2]))
        bias = dict.fromkeys(set(range(size)) - allowed, -np.inf)
        biased, before = sampler(size, seed, logit_bias=bias, **options), logits.copy()
        assert masked.sample(logits) == biased.sample(logits)
        for have, want in zip(masked.distribution(logits), biased.distribution(logits), strict=True):
            assert have.tolist() == want.tolist()
        assert np.array_equal(logits, before)
        masked.set_mask(None)
        assert masked.sample(logits) == sampler(size, seed, **options).sample(logits)


def test_log_probabilities_stay_the_models_own() -> None:
    logits = np.random.default_rng(3).normal(0, 3, 100).astype(np.float32)
    chain = sampler(100, temperature=0.0, logprobs=2)
    chain.set_mask(mask_of([int(logits.argmin())], 100))
    found, own = chain.sample(logits), log_softmax(logits)
    assert found.token_id == logits.argmin() and found.logprob == own.min()
    assert [token for token, _ in found.top] == np.argsort(-logits)[:2].tolist()


def test_a_mask_that_leaves_nothing_is_an_outcome() -> None:
    logits = np.zeros(40, np.float32)
    logits[7] = -np.inf
    for options in ({}, {"temperature": 0.0}, {"logprobs": 3}, {"logit_bias": {9: -np.inf}}):
        for allowed in ([], [7], [7, 9] if "logit_bias" in options else [7]):
            chain = sampler(40, **options)
            chain.set_mask(mask_of(allowed, 40))
            assert chain.sample(logits) == Sampled(EMPTY)
            assert [len(part) for part in chain.distribution(logits)] == [0, 0]
    with pytest.raises(RequestError, match="logit_bias forbids every token"):
        sampler(2, logit_bias={0: -np.inf, 1: -np.inf}).sample(logits[:2])
    logits[0] = np.nan
    with pytest.raises(KernelError, match="computed nan"):
        chain.sample(logits)


def test_tokens_behind_a_short_mask_are_forbidden() -> None:
    chain, logits = sampler(200, temperature=0.0), np.arange(200, dtype=np.float32)
    chain.set_mask(np.full(3, -1, np.int32))
    assert chain.sample(logits).token_id == 95
    chain.set_mask(np.zeros(0, np.int32))
    assert chain.sample(logits).token_id == EMPTY
    chain.set_mask(np.full(70, -1, np.int32))
    assert chain.sample(logits).token_id == 199


@pytest.mark.parametrize(("words", "sentence"), [
    ([1, 2], "A mask is list; give a contiguous array of int32 words"),
    (np.zeros(7), r"A mask is float64 of shape \(7,\); give"),
    (np.zeros((2, 4), np.int32), r"A mask is int32 of shape \(2, 4\)"),
    (np.zeros(14, np.int32)[::2], r"A mask is int32 of shape \(7,\); give a contiguous array"),
])
def test_what_is_no_mask(words: Any, sentence: str) -> None:
    chain = sampler(200)
    with pytest.raises(RequestError, match=sentence):
        chain.set_mask(words)
    assert chain.sample(np.zeros(200, np.float32)) == sampler(200).sample(np.zeros(200, np.float32))


# -- drafts: an even token is followed by an odd one -------------------------------------------------------------------

PARITY = [mask_of(range(first, 60, 2), 60) for first in (0, 1)]


def walk() -> Callable[[int], np.ndarray]:
    return lambda token: PARITY[1 - token % 2]


def test_each_checked_token_has_its_own_mask() -> None:
    chain, logits = sampler(60, temperature=0.0), np.arange(60, dtype=np.float32)
    chain.set_mask(PARITY[0])
    rows = chain.following([58, 59, 58], [PARITY[1], None, PARITY[0]])
    assert [row.sample(logits).token_id for row in rows] == [58, 59, 59, 58]
    chain.set_mask(PARITY[1])
    assert [row.sample(logits).token_id for row in chain.following([59])] == [59, 59]
    chain.set_mask(None)
    assert [row.sample(logits).token_id for row in chain.following([59, 59])] == [59, 59, 59]


def test_a_fork_keeps_its_mask() -> None:
    chain, logits = sampler(60, temperature=0.0), np.arange(60, dtype=np.float32)
    chain.set_mask(PARITY[0])
    other = chain.fork()
    chain.set_mask(PARITY[1])
    assert (chain.sample(logits).token_id, other.sample(logits).token_id) == (59, 58)


@pytest.mark.parametrize("vocab_size", [20, 60, 200])
def test_drafts_are_made_under_masks(vocab_size: int) -> None:
    """By a model with fewer or more tokens too; where its mask leaves nothing a draft ends."""
    rng = np.random.default_rng(4)

    def forward(places: list[int], ids: list[list[int]], specs: list[int], further: int) -> tuple[Any, Any]:
        return rng.normal(0, 3, (len(places), vocab_size)).astype(np.float32), [[] for _ in places]

    chains = [sampler(60, seed, temperature=3.0) for seed in range(8)]
    for number, chain in enumerate(chains):
        chain.draft_masks = walk
        chain.set_mask(PARITY[number % 2])
    chains[5].set_mask(np.zeros(2, np.int32))
    proposals = sampled(forward, [chain.for_draft(vocab_size, 6) for chain in chains], [[1]] * 8, 6, 60)
    for number, proposal in enumerate(proposals):
        assert [token % 2 for token in proposal] == ([] if number == 5 else [(number + i) % 2 for i in range(6)])
        assert max(proposal, default=0) < min(vocab_size, 60)
    chains[0].draft_masks = None
    (proposal,) = sampled(forward, [chains[0].for_draft(vocab_size, 6)], [[1]], 6, 60)
    assert len(proposal) == 6 and not any(token % 2 for token in proposal)
