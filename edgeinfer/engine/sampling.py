"""Choosing the next token: a chain of small NumPy functions on the logits of one position.

The order is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature. Every filter keeps a prefix of the
candidates sorted from best to worst, the lower id first among equals, so the chain sorts few candidates once and cuts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import GenerationConfig
from ..errors import KernelError, RequestError

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]

MAX_BIAS = 1e30
"""Stays finite in float32; a token with more is certain anyway."""


class Sampled(NamedTuple):
    """One chosen token."""

    token_id: int
    logprob: float | None = None
    """Natural logarithm of the token's probability in the model's own distribution; None if not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first, as many as asked for."""


def apply_penalties(
    logits: Floats, seen: Ids, counts: Floats, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> None:
    """Penalise tokens that occurred before, in place.

    Parameters
    ----------
    logits : float32 array of shape (vocab_size,), changed
    seen : distinct ids in the prompt or the generated text
    counts : float array of the same shape, how often each of them was generated (0: in the prompt only)
    repetition : divides positive and multiplies other logits of all seen tokens (CTRL, section 4.1)
    presence : subtracted once from generated tokens
    frequency : subtracted once per occurrence in the generated text
    """
    values = logits[seen].astype(np.float64)
    values = np.where(values > 0, values / repetition, values * repetition)
    values = values - presence * (counts > 0) - frequency * counts
    logits[seen] = np.minimum(values, np.finfo(np.float32).max)  # -inf stays: the token is forbidden


def top_k_ids(logits: Floats, k: int) -> Ids:
    """Return the ids of the k largest logits, best first, the lower id first among equals.

    Parameters
    ----------
    logits : float32 array of shape (vocab_size,), no NaN
    k : 1 or more; more than vocab_size means all
    """
    ids: Ids = np.arange(len(logits))
    if k < len(logits):
        ids = np.flatnonzero(logits >= _kth_largest(logits, k))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:k]]


def _kth_largest(logits: Floats, k: int) -> float:
    """Return the k-th largest value.

    Blocks of a large array whose maximum is below the k-th largest block maximum hold none of the k largest values,
    so all but a few values are only compared and never partitioned.
    """
    n, width = len(logits), 64
    n_blocks = n // width
    if n_blocks > 4 * k:
        whole = n_blocks * width
        maxima = logits[:whole].reshape(n_blocks, width).max(axis=1)
        blocks = np.flatnonzero(maxima >= np.partition(maxima, n_blocks - k)[n_blocks - k])
        logits = np.concatenate((logits[:whole].reshape(n_blocks, width)[blocks].ravel(), logits[whole:]))
        n = len(logits)
    return float(np.partition(logits, n - k)[n - k])


def n_top_p(probabilities: Floats, p: float) -> int:
    """Return how many of the best candidates reach probability p together (nucleus sampling), at least 1.

    Parameters
    ----------
    probabilities : float64 array, from best to worst; they need not hold all tokens, nor sum to 1
    p : above 0; 1 or more keeps all
    """
    if p >= 1:
        return len(probabilities)
    return min(int(np.searchsorted(np.cumsum(probabilities), p)) + 1, len(probabilities))


def n_min_p(logits: Floats, p: float) -> int:
    """Return how many candidates are at least p times as likely as the best one.

    Parameters
    ----------
    logits : float array, from best to worst
    p : 0 keeps all
    """
    if p <= 0:
        return len(logits)
    return int(np.count_nonzero(logits >= logits[0] + np.log(p)))


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """Return probabilities (float64) of logits divided by a positive temperature; the largest may stand anywhere."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    with np.errstate(over="ignore"):
        shifted /= temperature
    weights = np.exp(shifted)
    return weights / weights.sum()


def draw(probabilities: Floats, uniform: float) -> int:
    """Return the index that a uniform number in [0, 1) falls on; indices of probability 0 are never drawn."""
    steps = np.cumsum(probabilities)
    index = int(np.searchsorted(steps, uniform * steps[-1], side="right"))
    # Rounding may lift the product to the sum itself; then the last index of positive probability is meant.
    return index if index < len(steps) else int(np.searchsorted(steps, steps[-1]))


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities (float64) of float32 logits of shape (vocab_size,)."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    return shifted - np.log(np.exp(shifted).sum())


class Sampler:
    """Draws the tokens of one sequence.

    The same seed, index and logits give the same tokens, whatever the number of threads or of sequences: each
    sequence has a random stream of its own, and each drawn token takes one number of it.

    Parameters
    ----------
    config : what to do; `config.seed` is not read, since a request without one has it drawn by the caller
    vocab_size : length of the logits
    seed : of the request, 0 or more
    index : which of the request's parallel samples this is

    Raises
    ------
    RequestError
        `logit_bias` names an id outside the vocabulary or a value that is no number, or a penalty is not finite.
    """

    def __init__(self, config: GenerationConfig, vocab_size: int, seed: int, index: int = 0):
        self._config = config
        self._vocab_size = vocab_size
        self._bias_ids, self._bias = _checked_bias(config.logit_bias, vocab_size)
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(config, name)):
                raise RequestError(f"{name} is {getattr(config, name)}; it must be a finite number.")
        self._penalises = (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) != (1, 0, 0)
        self._counts: dict[int, int] = {}
        self._bits: Any = None
        if config.temperature > 0:  # numpy.random takes 12 ms to import, which greedy runs save
            from numpy.random import PCG64, SeedSequence

            self._bits = PCG64(SeedSequence((seed, index)))

    def prompt(self, ids: Iterable[int]) -> None:
        """Take note of the prompt: its tokens count for the repetition penalty only."""
        for token_id in ids:
            self._counts.setdefault(self._checked_id(token_id), 0)

    def accept(self, token_id: int) -> None:
        """Take note of a generated token."""
        token_id = self._checked_id(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def sample(self, logits: Floats) -> Sampled:
        """Choose a token; it counts for penalties once `accept` is called with it.

        Parameters
        ----------
        logits : float32 array of shape (vocab_size,), read only

        Raises
        ------
        KernelError
            The logits hold NaN or +inf, are all -inf, or have another shape.
        RequestError
            `logit_bias` forbids every token.
        """
        _check_logits(logits, self._vocab_size)
        edited = self._edited(logits)
        if self._config.temperature == 0:
            token_id = int(np.argmax(edited))  # the first of equals: the lowest id
        else:
            ids, probabilities = self._distribution(edited)
            choice = draw(probabilities, self._uniform())
            token_id = choice if ids is None else int(ids[choice])
        if self._config.logprobs is None:
            return Sampled(token_id)
        logprobs = log_softmax(logits)
        best = top_k_ids(logits, self._config.logprobs) if self._config.logprobs else ()
        return Sampled(token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in best))

    def distribution(self, logits: Floats) -> tuple[Ids, Floats]:
        """Return the tokens that may be drawn and their probabilities (float64, sum 1) after the whole chain.

        At temperature 0 this is one token of probability 1. Raises as `sample`.
        """
        _check_logits(logits, self._vocab_size)
        edited = self._edited(logits)
        if self._config.temperature == 0:
            return np.array([np.argmax(edited)]), np.ones(1)
        ids, probabilities = self._distribution(edited)
        return (np.arange(len(probabilities)) if ids is None else ids), probabilities

    def _edited(self, logits: Floats) -> Floats:
        """Return the logits with bias and penalties, in a copy where there are any."""
        if not len(self._bias_ids) and not (self._penalises and self._counts):
            return logits
        logits = logits.astype(np.float32)
        logits[self._bias_ids] += self._bias
        if self._penalises and self._counts:
            n, config = len(self._counts), self._config
            seen = np.fromiter(self._counts.keys(), np.intp, n)
            counts = np.fromiter(self._counts.values(), np.float64, n)
            penalties = config.repetition_penalty, config.presence_penalty, config.frequency_penalty
            apply_penalties(logits, seen, counts, *penalties)
        if logits.max() == -np.inf:
            raise RequestError("logit_bias forbids every token; leave at least one allowed.")
        return logits

    def _distribution(self, logits: Floats) -> tuple[Ids | None, Floats]:
        """Return candidates (None: all tokens) and their probabilities."""
        k, p = self._config.top_k, self._config.top_p
        min_p, temperature = self._config.min_p, self._config.temperature
        if 0 < k < len(logits):
            ids = top_k_ids(logits, k)
            kept = logits[ids]
            n = n_top_p(softmax(kept), p) if p < 1 else len(ids)
        elif p < 1:
            ids, n = _nucleus(logits, p, min_p)
            kept = logits[ids]
        elif min_p > 0:
            ids = np.flatnonzero(logits >= logits.max() + np.log(min_p))
            return ids, softmax(logits[ids], temperature)
        else:
            return None, softmax(logits, temperature)
        n = min(n, n_min_p(kept, min_p))
        return ids[:n], softmax(kept[:n], temperature)

    def _uniform(self) -> float:
        """Return the stream's next number in [0, 1), from raw bits: these are the same in all versions of NumPy."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def _checked_id(self, token_id: int) -> int:
        if not 0 <= token_id < self._vocab_size:
            raise RequestError(f"Token id {token_id} is outside the vocabulary of {self._vocab_size} tokens.")
        return int(token_id)


def _nucleus(logits: Floats, p: float, min_p: float) -> tuple[Ids, int]:
    """Return the best ids, sorted, and how many of them top-p keeps, without sorting the whole vocabulary.

    The sum runs over all tokens; candidates are added until they reach p, or until min-p would drop the last one.
    """
    top = float(logits.max())
    total = float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))
    k = 256
    while True:
        ids = top_k_ids(logits, k)
        weights = np.exp(logits[ids].astype(np.float64) - top)
        if k >= len(logits) or weights.sum() >= p * total or weights[-1] < min_p:
            return ids, n_top_p(weights / total, p)
        k *= 8


def _check_logits(logits: Floats, vocab_size: int) -> None:
    if logits.shape != (vocab_size,):
        raise KernelError(f"The logits have the shape {logits.shape}, but the vocabulary {vocab_size} tokens.")
    best = logits[np.argmax(logits)]  # NaN counts as the largest
    if not np.isfinite(best):
        hint = "its weights are damaged or a kernel is wrong (EDGEINFER_CHECK=1 finds which)"
        raise KernelError(f"The model computed {best} as its largest logit; {hint}.")


def _checked_bias(bias: dict[int, float], vocab_size: int) -> tuple[Ids, Floats]:
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < vocab_size:
            raise RequestError(f"logit_bias names token {token_id!r}; ids are from 0 to {vocab_size - 1}.")
        if not isinstance(value, (int, float)) or not value <= MAX_BIAS:
            raise RequestError(f"logit_bias of token {token_id} is {value!r}; it must be a number up to {MAX_BIAS:g}.")
    return np.array(list(bias), np.intp), np.array(list(bias.values()), np.float32)
