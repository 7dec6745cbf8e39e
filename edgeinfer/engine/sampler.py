"""The sampler of one sequence: its settings, its history, and the choice of the next token.

The filters and the choice of a token are in `kernels/sampling.py`. A runner whose program has the sample kernels
chooses within its pass; otherwise, and where a row has nothing to choose from, the row of logits is looked at here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from edgeinfer.kernels import abi, sampling

from ..config import GenerationConfig
from ..errors import KernelError, RequestError
from .sample_spec import EDIT, NONE, Mask, checked_bias, checked_mask, new_spec, penalises, stream_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.floating[Any]]"
Ids: TypeAlias = "NDArray[np.intp]"

_N_EDITS = abi.SAMPLE_N_EDITS >> 3
EMPTY = -2
"""Token id if a mask allows no token."""


class Sampled(NamedTuple):
    """One chosen token."""

    token_id: int
    """EMPTY if there is none to choose: the mask forbids all tokens that the logits and `logit_bias` allow."""
    logprob: float | None = None
    """Natural logarithm of the token's probability in the model's own distribution; None if not requested."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first, as many as asked for."""


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """Return probabilities (float64) of logits divided by a positive temperature; the largest may be anywhere."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    with np.errstate(over="ignore"):
        shifted /= temperature
    weights = np.exp(shifted)
    return weights / weights.sum()


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities (float64) of float32 logits of shape (vocab_size,)."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    return shifted - np.log(np.exp(shifted).sum())


class Sampler:
    """Samples the tokens of one sequence.

    Seed, index, preceding tokens and logits determine the token, for any number of threads and sequences and in every
    implementation: random numbers depend on seed, index, position and token id alone.

    Parameters
    ----------
    config : settings of the sampler, except for `config.seed`
    vocab_size : length of the logits
    seed : seed of the request, 0 or more; the caller samples one for a request without
    index : which of the request's parallel samples this is
    room : most tokens that it will see, the prompt's included; by default as many different ones as there are
    ends : tokens that end the text: a forward pass of several steps stops there

    Attributes
    ----------
    address : int
        Of the settings as kernels read them (abi.SAMPLE_*); they belong to this sampler and live as long as it does.
    ends : frozenset of int
        Tokens that end the text.
    draft_masks : callable or None
        Begins a draft: returns a function that takes one draft token after the other and returns the mask of the token
        after it. Without one, draft tokens all have the mask of the token that is sampled next.

    Raises
    ------
    RequestError
        `logit_bias` names an id outside the vocabulary or a value that is not a number.
    """

    def __init__(self, config: GenerationConfig, vocab_size: int, seed: int, index: int = 0, room: int | None = None,
                 ends: Iterable[int] = ()):
        self._config, self._logprobs = config, config.logprobs
        self._vocab_size = vocab_size
        bias = checked_bias(config.logit_bias, vocab_size)
        self._penalties = config.repetition_penalty, config.presence_penalty, config.frequency_penalty
        self._penalises = penalises(config)
        self._key, self._position = stream_key(seed, index), 0
        most = (vocab_size if room is None else room) if self._penalises else 0
        edits = np.zeros(min(len(bias) + most, vocab_size), EDIT)
        self._places = {token_id: place for place, token_id in enumerate(bias)}
        """Index of each token in the edits."""
        if bias:
            with np.errstate(over="ignore"):  # below the range of float32: forbidden
                edits["token"][: len(bias)], edits["bias"][: len(bias)] = list(bias), list(bias.values())
        edits["count"] = NONE
        self.ends = frozenset(ends)
        self._ends = np.array(sorted(self.ends), np.int64)
        self._following: list[Sampler] = []
        self.draft_masks: Callable[[], Callable[[int], Mask | None]] | None = None
        self._behind: Callable[[int], Mask | None] | None = None
        self._mask: Mask | None = None
        self._keep(new_spec(config, self._key, self._ends, len(bias)), edits)

    def _keep(self, spec: NDArray[np.int64], edits: NDArray[Any]) -> None:
        """Take memory that kernels read: the settings, and the tokens that have biases or penalties."""
        spec[abi.SAMPLE_EDITS >> 3] = edits.ctypes.data
        self._edits, self._tokens, self._counts = edits, edits["token"], edits["count"]
        self.address, self._spec = spec.ctypes.data, spec.data

    def set_mask(self, words: Mask | None) -> None:
        """Let only tokens be sampled whose bit is set, until another mask is set; None allows all.

        A forward pass reads the words in place, so the mask of a later token belongs in another array. Tokens after the
        last word are forbidden. Raises `RequestError` for anything but an array of such words.
        """
        self._mask = words = None if words is None else checked_mask(words, self._vocab_size)
        self._spec[abi.SAMPLE_MASK >> 3] = 0 if words is None else words.ctypes.data

    def following(self, proposals: Items[int], masks: Items[Mask | None] = ()) -> list[Sampler]:
        """Return the samplers of the next token (this one) and of the token after each draft token, if the draft tokens
        are right.

        All but the first are valid until this is called again. They have the masks that are given, one for the token
        after each draft token; without any they have this sampler's.
        """
        samplers = [self]
        for place, proposal in enumerate(proposals):
            if place == len(self._following):
                self._following.append(self.fork())
            samplers.append(self._following[place])
            samplers[-1]._follow(samplers[-2], proposal)
            samplers[-1].set_mask(masks[place] if masks else self._mask)
        return samplers

    def fork(self) -> Sampler:
        """Return a sampler that goes its own way from here, with the same random numbers."""
        other = copy.copy(self)
        other._keep(np.array(self._spec), self._edits.copy())
        other._places, other._following = dict(self._places), []
        return other

    def for_draft(self, vocab_size: int, n: int) -> Sampler:
        """Return a sampler that drafts up to n tokens which this one samples from here on, from logits of another
        model.

        Settings and random numbers are the same; no token after that model's vocabulary has a bias or a penalty. Masks
        are those of `draft_masks`.
        """
        other = copy.copy(self)
        known = self._edits[: len(self._places)]
        if vocab_size < self._vocab_size:
            known = known[known["token"] < vocab_size]
        edits = np.zeros(len(known) + n * self._penalises, EDIT)
        edits[: len(known)], edits["count"][len(known) :] = known, NONE
        spec = np.array(self._spec)
        spec[abi.SAMPLE_TOKEN >> 3], spec[_N_EDITS] = NONE, len(known)
        other._keep(spec, edits)
        other._places = {token_id: place for place, token_id in enumerate(known["token"].tolist())}
        other._vocab_size, other._logprobs, other._following = vocab_size, None, []
        other._behind = self.draft_masks() if self.draft_masks else None
        other.set_mask(self._mask)
        return other

    def _follow(self, before: Sampler, token_id: int) -> None:
        """Become a copy of another sampler after one more token."""
        self._position, self._spec[0] = before._position, NONE
        if self._penalises:
            n = len(before._places)
            self._edits[:n], self._counts[n : n + 1] = before._edits[:n], NONE
            self._places = dict(before._places)
        self._note(token_id, 1)

    @property
    def needs_each(self) -> bool:
        """True if it must see each row of logits."""
        return self._logprobs is not None

    @property
    def certain(self) -> bool:
        """True if it needs no logits to take the only token that a mask allows."""
        return self._logprobs is None and not self._config.logit_bias

    def prompt(self, ids: Iterable[int]) -> None:
        """Record the prompt: its tokens count for the repetition penalty only."""
        for token_id in ids:
            self._note(token_id, 0)

    def accept(self, token_id: int, noted: bool = False) -> None:
        """Record a generated token; its penalty is already `noted` if the forward pass continued with it."""
        if self._behind:
            self.set_mask(self._behind(token_id))
        if not noted:
            self._note(token_id, 1)
            return
        self._position += 1
        if self._penalises:
            self._places.setdefault(token_id, len(self._places))

    def _note(self, token_id: int, times: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise RequestError(f"Token id {token_id} is outside the vocabulary of {self._vocab_size} tokens.")
        self._position += 1
        if self._penalises:
            place = self._places.setdefault(int(token_id), len(self._places))
            self._tokens[place], self._counts[place] = token_id, max(int(self._counts[place]), 0) + times
            self._spec[_N_EDITS] = len(self._places)

    def sample(self, logits: Floats) -> Sampled:
        """Choose a token, EMPTY if the mask leaves none; it counts for penalties once `accept` is called with it.

        Parameters
        ----------
        logits : float32 array of shape (vocab_size,), read only; those of the pass that was given `address`, if any

        Raises
        ------
        KernelError
            The logits hold NaN or +inf, are all -inf, or have another shape.
        RequestError
            `logit_bias` forbids every token.
        """
        token_id = self._spec[0]
        if token_id == NONE:
            token_id = self._sample(logits)
        else:
            self._spec[0] = NONE  # chosen within the forward pass
        return self.named(token_id, logits)

    def named(self, token_id: int, logits: Floats) -> Sampled:
        """Return a token with the log-probabilities that are requested."""
        if self._logprobs is None or token_id == EMPTY:
            return Sampled(token_id)
        logprobs = log_softmax(logits)
        best = sampling.top_k_ids(logits, self._logprobs) if self._logprobs else ()
        return Sampled(token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in best))

    def _sample(self, logits: Floats) -> int:
        edited = self.allowed(self.edited(logits))
        if edited is None:
            return EMPTY
        if self._config.temperature == 0:
            return int(np.argmax(edited))  # the first of equals: the lowest id
        return sampling.sample(edited, self._candidates(edited), self._config.temperature, self._key, self._position)

    def distribution(self, logits: Floats) -> tuple[Ids, Floats]:
        """Return the tokens that may be sampled and their probabilities (float64, sum 1) after the whole chain.

        At temperature 0 this is one token of probability 1; where the mask leaves none there are none. Raises as
        `sample`.
        """
        edited = self.allowed(self.edited(logits))
        if edited is None:
            return np.zeros(0, np.intp), np.zeros(0)
        if self._config.temperature == 0:
            return np.array([np.argmax(edited)]), np.ones(1)
        ids = self._candidates(edited)
        ids = np.arange(self._vocab_size) if ids is None else ids
        return ids, softmax(edited[ids], self._config.temperature)

    def _candidates(self, logits: Floats) -> Ids | None:
        return sampling.candidates(logits, self._config.top_k, self._config.top_p, self._config.min_p)

    def allowed(self, edited: Floats) -> Floats | None:
        """Return the logits with -inf for masked tokens, as a copy if there is a mask; None if no token is allowed."""
        if self._mask is None:
            return edited
        edited = sampling.forbid(edited, self._mask)
        return edited if edited.max() > -np.inf else None

    def edited(self, logits: Floats) -> Floats:
        """Return the logits, checked, with bias and penalties in a copy if there are any."""
        if logits.shape != (self._vocab_size,):
            size = self._vocab_size
            raise KernelError(f"The logits have the shape {logits.shape}, but the vocabulary has {size} tokens.")
        best = logits.max()  # NaN counts as the largest
        if not np.isfinite(best):
            hint = "its weights are damaged or a kernel is wrong (EDGEINFER_CHECK=1 finds which)"
            raise KernelError(f"The model computed {best} as its largest logit; {hint}.")
        edits = self._edits[: len(self._places)]
        if not len(edits):
            return logits
        logits = logits.astype(np.float32)
        logits[edits["token"]] += edits["bias"]
        seen = edits[edits["count"] >= 0]
        sampling.apply_penalties(logits, seen["token"], seen["count"], *self._penalties)
        if logits.max() == -np.inf:
            raise RequestError("logit_bias forbids every token; leave at least one allowed.")
        return logits
