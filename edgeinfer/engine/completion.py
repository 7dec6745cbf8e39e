"""Results of a request: text, tokens and timings."""

from __future__ import annotations

import math
from dataclasses import field
from typing import NamedTuple

from ..base.dataclass import dataclass


class TopLogprob(NamedTuple):
    """One of the tokens that were likeliest in a place."""

    token_id: int
    text: str
    logprob: float
    """Natural logarithm of its probability in the model's own distribution."""


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token, its probability, and the likeliest alternatives."""

    token_id: int
    text: str
    logprob: float
    """Natural logarithm of the token's probability in the model's own distribution (before the sampling chain)."""
    top: tuple[TopLogprob, ...] = ()
    """The most likely tokens, best first, as many as asked for."""


@dataclass(frozen=True)
class Choice:
    """One of the samples of a request, or of the best beams."""

    index: int
    text: str
    """The generated text, without the prompt, the end token and the stop string."""
    token_ids: tuple[int, ...]
    """Generated tokens without the end token; those of a stop string are among them."""
    finish_reason: str
    """stop (end token, stop string, or the end of the form that was requested), length (max_tokens or a full context),
    grammar (the form and `logit_bias` left no token) or cancelled."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`, if asked for."""
    score: float | None = None
    """Score of a beam: the sum of the tokens' log-probabilities, the end token's too, over their number to the power of
    `length_penalty`; None for samples."""
    stop_string: str | None = None
    """The stop string that has ended the text, if one has."""
    end: TokenLogprob | None = None
    """Log-probability of the end token, if one has ended the text and log-probabilities were asked for."""


@dataclass(frozen=True)
class Score:
    """Log-probability of one continuation of a prompt."""

    text: str | None
    """The continuation; None if it was given as token ids."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of each token's probability after the prompt and the tokens before it, in the model's own
    distribution (temperature 1, no filter)."""
    greedy: bool
    """True if each token is the likeliest in its place, so that greedy decoding would write this continuation."""
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Token id and log-probability of the likeliest tokens in each place, best first, if requested."""

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation: the sum."""
        return math.fsum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, which compares continuations of different lengths."""
        return self.logprob / len(self.logprobs)


@dataclass(frozen=True)
class SpeculationReport:
    """Statistics of speculation in a request."""

    drafter: str
    """lookup, draft or self."""
    state: str
    """on; off, if it was measured to be slower; or idle, if there was nothing to draft."""
    walks: int
    """Forward passes that verified draft tokens."""
    drafted: int
    """Draft tokens that were verified."""
    accepted: int
    """Number of accepted draft tokens, those whose text was taken."""
    accepted_per_position: tuple[int, ...]
    """Number of forward passes that accepted the first draft token, the second, ..."""
    tokens_per_walk: float | None
    """Tokens that each text got from a forward pass with draft tokens, on the average; None without one."""
    gain: float | None
    """Speed of the whole decoding over that of the same tokens without speculation, from passes of this request and
    those before it cost; None if no pass verified a draft."""


@dataclass(frozen=True)
class Completion:
    """The outcome of a request. Text, tokens and finish reason are those of the first sample, or of the best beam."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    """Tokens of the prompt, with the beginning-of-text token."""
    cached_tokens: int
    """Prompt tokens that were not computed because their KV blocks were cached."""
    completion_tokens: int
    """Generated tokens of all samples, without end tokens."""
    ttft_ms: float | None
    """Time to first token; None without a token."""
    tpot_ms: float | None
    """Time per output token after the first, of one sample; None under 2 tokens."""
    tok_per_s: float | None
    """Generated tokens per second after the first ones, all samples together; None under 2 tokens."""
    finish_reason: str
    seed: int
    """Seed of the random choices; the same seed gives the same text."""
    logprobs: tuple[TokenLogprob, ...] | None
    choices: tuple[Choice, ...] = field(repr=False)
    """All samples; of beams as many as were requested, the best first."""
    speculation: SpeculationReport | None = None
    """Statistics of speculation; None if it was off."""
    queued_ms: float = 0.0
    """Part of `ttft_ms` before its first forward pass, while others had the blocks or sequences that it needs."""
    preemptions: int = 0
    """Number of times that its KV blocks were taken for older requests, and computed again."""

    @property
    def score(self) -> float | None:
        """Score of the best beam; None for samples."""
        return self.choices[0].score

    @property
    def plain_tpot_ms(self) -> float | None:
        """Time per output token as forward passes without draft tokens would have taken it."""
        gain = self.speculation.gain if self.speculation else None
        return self.tpot_ms and self.tpot_ms * (gain or 1)
