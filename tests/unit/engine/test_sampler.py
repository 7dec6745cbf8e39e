"""The sampler in NumPy against a naive oracle, its distributions by chi-square, its random numbers, and its edges."""

from __future__ import annotations

import math
import time
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine.sample_spec import stream_key
from edgeinfer.engine.sampler import Sampled, Sampler, log_softmax, softmax
from edgeinfer.errors import KernelError, RequestError, UsageError
from edgeinfer.kernels import sampling
from edgeinfer.kernels.sampling import apply_penalties, top_k_ids

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
STREAM_KEY = 12555369654503884197
UNIFORMS = [0.15509833953995888, 0.3065658277962141, 0.491338558728211]
TEXT, OTHER = [524, 551, 707, 379, 849], [662]
SIZES = (1, 7, 31, 33, 127, 1023, 4096, 65_537)


def sampler(vocab_size: int, seed: int = 1, index: int = 0, **options: Any) -> Sampler:
    return Sampler(GenerationConfig(**{**OFF, **options}), vocab_size, seed, index)


def random_logits(size: int, seed: int = 0, ties: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal(size) * 4
    return (np.round(logits) if ties else logits).astype(np.float32)


def naive(logits: np.ndarray, k: int, p: float, min_p: float, temperature: float) -> dict[int, float]:
    """Sort everything, then apply top-k, top-p, min-p and temperature in this order, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[:k] if k else order
    weights = [float(np.exp(np.float64(logits[i]) - np.float64(logits[order[0]]))) for i in order]
    kept, reached = [], 0.0
    for token_id, weight in zip(order, weights, strict=True):
        if p < 1 and reached >= p * sum(weights):
            break
        kept.append((token_id, weight))
        reached += weight
    kept = [(token_id, weight) for token_id, weight in kept if weight >= min_p]
    scaled = [weight ** (1 / temperature) for _, weight in kept]
    return {token_id: value / sum(scaled) for (token_id, _), value in zip(kept, scaled, strict=True)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_is_the_head_of_a_full_sort(size: int, ties: bool) -> None:
    for seed in range(3):
        logits = random_logits(size, seed, ties)
        order = np.lexsort((np.arange(size), -logits))
        for k in (1, 2, 5, 40, size - 1, size, size + 9):
            if k > 0:
                assert np.array_equal(top_k_ids(logits, k), order[:k])


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [1, 7, 33, 1023, 4096])
def test_filters_against_the_oracle(size: int, ties: bool) -> None:
    for seed, k in enumerate((0, 1, 3, 40, 5000)):
        for p in (1.0, 0.95, 0.5, 1e-6):
            for min_p in (0.0, 0.05, 1.0):
                logits = random_logits(size, seed, ties)
                chain = sampler(size, top_k=k, top_p=p, min_p=min_p, temperature=0.7)
                ids, probabilities = chain.distribution(logits)
                want = naive(logits, k, p, min_p, 0.7)
                assert set(ids.tolist()) == set(want), (k, p, min_p)
                assert np.allclose(probabilities, [want[i] for i in ids.tolist()], rtol=1e-9)
                assert probabilities.sum() == pytest.approx(1)


def test_the_nucleus_of_a_large_flat_vocabulary() -> None:
    """Nearly all tokens belong to it, so its search has to grow to the whole vocabulary."""
    logits = random_logits(20_000) / 100
    ids, probabilities = sampler(20_000, top_p=0.9).distribution(logits)
    full = softmax(logits)
    assert 0.9 <= full[ids].sum() < 0.9 + full.max()
    assert len(ids) > 16_000 and np.allclose(probabilities, full[ids] / full[ids].sum())


def text_of(chain: Sampler, logits: np.ndarray, n: int) -> list[int]:
    """Sample n tokens one after the other, always from the same logits."""
    sampled = []
    for _ in range(n):
        sampled.append(chain.sample(logits).token_id)
        chain.accept(sampled[-1])
    return sampled


def counts_of(chain: Sampler, logits: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(text_of(chain, logits, n), minlength=len(logits))


SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.95, "min_p": 0.05, "temperature": 0.7},
]  # fmt: skip


def sample_specs(logits: np.ndarray, ids: np.ndarray, temperature: float, n: int, seed: int) -> np.ndarray:
    """The tokens that `sampling.sample` gives at positions 0 .. n - 1, all at once."""
    scores = (logits[ids].astype(np.float64) - logits.max()) / temperature
    key, flat = sampling.stream_key(seed, 0), np.tile(ids, n)
    states = np.repeat(sampling.absorb(key, np.arange(n)), len(ids))
    uniform = ((sampling.absorb(states, flat) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return ids[(scores + sampling.gumbels(uniform).reshape(n, -1)).argmax(axis=1)]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("options", SETTINGS)
def test_sampled_tokens_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square of 100,000 positions; the sampler itself samples the first of them."""
    logits, n = random_logits(12, seed=4) / 3, 100_000
    chain = sampler(12, seed=5, **options)
    ids, probabilities = chain.distribution(logits)
    order = np.argsort(ids)
    ids, probabilities = ids[order], probabilities[order]
    sampled = sample_specs(logits, ids, options.get("temperature", 1.0), n, seed=5)
    assert text_of(chain, logits, 500) == sampled[:500].tolist()
    expected = probabilities * n
    chi_square = ((np.bincount(sampled, minlength=12)[ids] - expected) ** 2 / expected).sum()
    freedom = len(ids) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations; the seed is fixed


def test_neighbouring_numbers_are_independent() -> None:
    """Pairs along each coordinate fall evenly on a grid: seeds, samples, positions and token ids."""
    n, grid = 40_000, 20
    for vary in range(4):
        coordinates = [3, 1, 17, 5]
        values = []
        for step in (0, 1):
            at = [np.full(n, c) for c in coordinates]
            at[vary] = np.arange(n) + step
            state: Any = 0
            for numbers in at:
                state = sampling.absorb(state, numbers)
            values.append((state >> np.uint64(12)).astype(np.float64) * 2.0**-52)
        cells = np.bincount((values[0] * grid).astype(int) * grid + (values[1] * grid).astype(int), minlength=grid**2)
        expected = n / grid**2
        assert ((cells - expected) ** 2 / expected).sum() < grid**2 + 4 * np.sqrt(2 * grid**2)


def test_same_seed_same_tokens() -> None:
    logits = random_logits(512)
    streams = [tuple(text_of(sampler(512, seed, index), logits, 30))
               for seed, index in [(1, 0), (1, 0), (1, 1), (2, 0), (2**62, 3)]]
    assert streams[0] == streams[1] and len(set(streams)) == 4


def test_random_numbers_are_fixed_for_ever() -> None:
    """These may never change: a seed that a user wrote down must give the same text in later versions.

    The first are the numbers that SplitMix64 is known by.
    """
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert sampling.absorb(1234567, np.arange(5)).tolist() == known
    assert sampling.stream_key(42, 1) == stream_key(42, 1) == STREAM_KEY
    for seed in (0, 1, 2**32 - 1, 2**63, 2**64 - 1):
        assert stream_key(seed, 3) == sampling.stream_key(seed, 3)
    assert sampling.uniforms(STREAM_KEY, 7, np.arange(3)).tolist() == UNIFORMS
    logits = np.zeros(1000, np.float32)
    assert text_of(sampler(1000, seed=42), logits, 5) == TEXT
    assert text_of(sampler(1000, seed=42, index=1), logits, 1) == OTHER


def test_a_tokens_number_depends_on_seed_sample_position_and_id_alone() -> None:
    """Other candidates, another history of the same length and earlier samples do not change it."""
    flat, sharp = np.zeros(100, np.float32), np.zeros(100, np.float32)
    sharp[7] = 50
    one, other = sampler(100), sampler(100)
    other.prompt([9])
    one.sample(flat)
    assert one.sample(sharp) == Sampled(7)
    one.accept(7)
    chosen = one.sample(flat).token_id
    assert other.sample(flat).token_id == chosen
    fewer = np.full(100, -np.inf, np.float32)
    fewer[[3, chosen, 90]] = 0
    assert other.sample(fewer).token_id == chosen


@pytest.mark.parametrize("function", [sampling.log, sampling.exp])
def test_elementary_functions_within_an_ulp(function: Any) -> None:
    x = np.random.default_rng(0).random(300)
    x = np.concatenate([x, 1 - x[:50] * 2.0**-40, x[:50] * 2.0**-50, [1.0, 1 - 2.0**-53, 2.0**-53]])
    x = x * 40 if function is sampling.log else -x * 700
    with localcontext() as context:
        context.prec = 40
        exact = [getattr(Decimal(float(v)), "ln" if function is sampling.log else "exp")() for v in x]
        errors = [abs((Decimal(float(have)) - want) / Decimal(math.ulp(float(want))))
                  for have, want in zip(function(x), exact, strict=True)]
    assert max(errors) < 1
    assert sampling.exp(np.array([0.0, -1e9, -np.inf])).tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 50.0])
def test_a_sample_from_a_large_vocabulary_computes_few_numbers_exactly_and_takes_the_best(temperature: float) -> None:
    for seed in range(20):
        logits = random_logits(20_000, seed)
        scores = (logits.astype(np.float64) - float(logits.max())) / temperature
        scores += sampling.gumbels(sampling.uniforms(sampling.stream_key(seed, 0), 0, np.arange(20_000)))
        assert sampler(20_000, seed, temperature=temperature).sample(logits).token_id == scores.argmax()


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    chain = sampler(6, temperature=0.0)
    assert chain.sample(np.array([1, 3, 0, 3, 2, 3], np.float32)) == Sampled(1)
    ids, probabilities = chain.distribution(np.array([1, 3, 0, 3, 2, 3], np.float32))
    assert (ids.tolist(), probabilities.tolist()) == ([1], [1.0])


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.05}])
def test_extreme_temperatures(options: dict[str, Any]) -> None:
    logits = random_logits(64)
    for temperature in (1e-6, 5e-324):
        assert counts_of(sampler(64, temperature=temperature, **options), logits, 20)[logits.argmax()] == 20
    ids, probabilities = sampler(64, temperature=1e6, **options).distribution(logits)
    assert np.allclose(probabilities, 1 / len(ids), rtol=1e-4)


def test_extreme_logits() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 30]] = -3e38, 3e38
    assert sampler(50).sample(logits).token_id == 30
    logits[30] = -np.inf
    for options in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert counts_of(sampler(50, **options), logits, 20)[3] == 20


@pytest.mark.parametrize(("value", "word"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits(value: float, word: str, temperature: float) -> None:
    logits = np.full(10, -np.inf, np.float32) if value == -np.inf else random_logits(10)
    logits[6] = value
    chain = sampler(10, temperature=temperature)
    for method in (chain.sample, chain.distribution):
        with pytest.raises(KernelError, match=f"computed {word} as its largest logit; its weights are damaged"):
            method(logits)


def test_logits_of_another_shape() -> None:
    with pytest.raises(KernelError, match=r"have the shape \(9,\), but the vocabulary has 10 tokens"):
        sampler(10).sample(np.zeros(9, np.float32))


def test_logit_bias() -> None:
    logits = random_logits(20)
    best = int(logits.argmax())
    forbidden = sampler(20, logit_bias={best: -np.inf})
    assert counts_of(forbidden, logits, 300)[best] == 0
    assert sampler(20, temperature=0.0, logit_bias={4: 100.0}).sample(logits).token_id == 4
    before = logits.copy()
    sampler(20, logit_bias={4: 3.0}, repetition_penalty=2.0).sample(logits)
    assert np.array_equal(before, logits)


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ({20: 1.0}, "logit_bias names token 20; ids are from 0 to 19"),
        ({-1: 1.0}, "logit_bias names token -1"),
        ({"a": 1.0}, "logit_bias is {'a': 1.0}; it must be a mapping of token ids to numbers"),
        ({3: float("inf")}, r"logit_bias of token 3 is inf; it must be a number up to 1e\+30"),
        ({3: float("nan")}, "logit_bias is {3: nan}; it must be"),
        ({3: "x"}, "logit_bias is {3: 'x'}; it must be"),
    ],
)
def test_wrong_logit_bias(bias: Any, sentence: str) -> None:
    with pytest.raises((RequestError, UsageError), match=sentence):
        sampler(20, logit_bias=bias)


def test_bias_that_forbids_everything() -> None:
    chain = sampler(3, logit_bias=dict.fromkeys(range(3), -np.inf))
    with pytest.raises(RequestError, match="logit_bias forbids every token; leave at least one allowed"):
        chain.sample(np.zeros(3, np.float32))


def test_penalties() -> None:
    logits = np.array([4, -4, 2, -2, 1, -np.inf], np.float32)
    apply_penalties(logits, np.array([0, 1, 2, 5]), np.array([0.0, 2, 3, 1]), 2.0, 0.5, 0.25)
    assert logits.tolist() == [2, -8 - 0.5 - 0.5, 1 - 0.5 - 0.75, -2, 1, -np.inf]


def test_history_of_prompt_and_text() -> None:
    logits = np.array([3, 2.5, 2, 1], np.float32)
    chain = sampler(4, temperature=0.0, repetition_penalty=1.5)
    chain.prompt([0, 0])
    assert chain.sample(logits).token_id == 1
    chain.accept(1)
    assert chain.sample(logits) == Sampled(0)  # both are penalised now: 2, 1.67, 2, 1
    text_only = sampler(4, temperature=0.0, presence_penalty=0.6, frequency_penalty=0.3)
    text_only.prompt([0, 0, 0])
    assert text_only.sample(logits).token_id == 0
    text_only.accept(0)
    assert text_only.sample(logits).token_id == 1  # 3 - 0.9 < 2.5
    bonus = sampler(4, temperature=0.0, frequency_penalty=-3.0)
    bonus.accept(3)
    assert bonus.sample(logits).token_id == 3


def test_a_tiny_repetition_penalty_stays_finite() -> None:
    chain = sampler(4, repetition_penalty=1e-300)
    chain.prompt([2])
    assert chain.sample(np.ones(4, np.float32)).token_id == 2


@pytest.mark.parametrize("token_id", [-1, 4])
def test_history_outside_the_vocabulary(token_id: int) -> None:
    chain = sampler(4)
    for note in (chain.accept, lambda i: chain.prompt([i])):
        with pytest.raises(RequestError, match=rf"Token id {token_id} is outside the vocabulary of 4 tokens"):
            note(token_id)


def test_penalties_must_be_finite() -> None:
    with pytest.raises(UsageError, match="presence_penalty is nan; it must be a finite number"):
        sampler(4, presence_penalty=float("nan"))
    with pytest.raises(UsageError, match="frequency_penalty is inf"):
        sampler(4, frequency_penalty=float("inf"))


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(300)
    want = np.log(softmax(logits))
    assert np.allclose(log_softmax(logits), want)
    chosen = sampler(300, temperature=0.3, top_k=2, logprobs=3, logit_bias={5: 9.0}).sample(logits)
    assert chosen.logprob == pytest.approx(want[chosen.token_id])
    best = np.argsort(-want)[:3]
    assert [token_id for token_id, _ in chosen.top] == best.tolist()
    assert [value for _, value in chosen.top] == pytest.approx(want[best].tolist())
    alone = sampler(300, logprobs=0).sample(logits)
    assert alone.logprob is not None and alone.top == ()
    assert sampler(300).sample(logits).logprob is None
    logits[7] = -np.inf
    assert dict(sampler(300, logprobs=100).sample(logits).top).keys() == set(top_k_ids(logits, 100).tolist())


def test_a_sample_never_takes_an_impossible_token() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 1, -np.inf], np.float32)
    assert set(text_of(sampler(5), logits, 300)) == {1, 3}


@pytest.mark.timing
def test_sampling_costs_little_beside_one_look_at_the_row() -> None:
    """Sampling a row in NumPy is compared with partitioning it, in turns, the best of many.

    It takes 3 to 4 times as long; sorting the row takes 30 times.
    """
    size = 151_936
    chain, logits = Sampler(GenerationConfig(), size, 1), random_logits(size)
    best = {"sample": math.inf, "partition": math.inf}
    for _ in range(40):
        for name, run in (("sample", lambda: chain.sample(logits)), ("partition", lambda: np.partition(logits, -40))):
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    assert best["sample"] < 12 * best["partition"]
