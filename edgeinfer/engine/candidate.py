"""One text of a request while it grows: its tokens, their sampling, and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..text import StopStrings, StreamDecoder, Tokenizer
from .completion import Choice, TokenLogprob, TopLogprob
from .sampler import EMPTY, Sampled, Sampler

if TYPE_CHECKING:
    from ..runner import Sequence
    from ..text import Constraint
    from .speculation.usage import Usage

_keys = count()


class Delta(NamedTuple):
    """New text and tokens of a sample since its client last looked."""

    number: int
    """Index of the sample."""
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    """Empty while it continues."""
    end: TokenLogprob | None
    """Log-probability of the end token, see `Choice.end`."""


class Tokens(NamedTuple):
    """New tokens of a sample, each with its text, since another process last looked."""

    pieces: list[str]
    """Text of each token; after the last one also the text that was held back."""
    ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    end: TokenLogprob | None
    stop_string: str | None


class Sample:
    """The state of one sample.

    Attributes
    ----------
    key : int
        No other sample of this process has it.
    usage : Usage or None
        Statistics of speculation in its request.
    accepted : int
        Draft tokens that were right in the last forward pass that verified some.
    constraint : Constraint or None
        Form that the text must have.
    """

    def __init__(self, prompt_ids: Items[int], sampler: Sampler, stop: Items[str], tokenizer: Tokenizer | None,
                 eos_ids: frozenset[int], index: int, constraint: Constraint | None = None,
                 skip_special: bool = True):
        self.index, self.key = index, next(_keys)
        self.usage: Usage | None = None
        self.accepted = 0
        self.tokens = list(prompt_ids)
        self.sequence: Sequence | None = None
        self.finish_reason = ""
        self.score: float | None = None
        self.sampler = sampler
        self._tokenizer = tokenizer
        self._decoder: StreamDecoder | None = tokenizer.stream(prompt_ids, skip_special) if tokenizer else None
        self._stops = StopStrings(stop)
        self._eos_ids = eos_ids
        self._prompt_tokens = len(self.tokens)
        self.constraint = constraint
        self.prepare: Callable[[], None] | None = constraint.prepare if constraint else None
        """Computes the mask of the next token, which takes up to a millisecond."""
        if constraint:
            sampler.set_mask(constraint.mask())
            sampler.draft_masks = constraint.drafting
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: TokenLogprob | None = None

    @property
    def last_id(self) -> int:
        """The token to decode next."""
        return self.tokens[-1]

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self._prompt_tokens

    def take(self, logits: Any, room: int, chosen: Iterable[int] = ()) -> str:
        """Take the tokens `chosen` already and one from the logits; return the text that they complete.

        `room` is the most tokens of this sample. Text after a stop string is dropped.
        """
        text = ""
        for token_id in chosen:
            text += self._accept(Sampled(token_id), room, noted=True)
            if self.finish_reason:
                return text
        return text + self._accept(self.sampler.sample(logits), room) + self._force(room)

    def resume(self, token_ids: Items[int], room: int) -> None:
        """Take tokens that were sampled and reported elsewhere."""
        for token_id in token_ids:
            self._accept(Sampled(token_id), room)

    def verify(self, samplers: Items[Sampler], logits: Items[Any], proposal: list[int], room: int) -> tuple[str, int]:
        """Sample the next token, and the one after each draft token that is right; return their text and how many are.
        """
        text = ""
        for right, (sampler, row) in enumerate(zip(samplers, logits, strict=True)):
            sampled = sampler.sample(row)
            text += self._accept(sampled, room)
            if self.finish_reason or proposal[right : right + 1] != [sampled.token_id]:
                break
        return text + self._force(room), right

    def _force(self, room: int) -> str:
        """Take the tokens that the form of the text forces: nothing is sampled where one token alone may come.

        Log-probabilities need the logits, and a bias may forbid the token.
        """
        certain = self.constraint and not self.finish_reason and self.sampler.certain
        text = ""
        for token_id in self.constraint.forced(room - self.n_tokens) if self.constraint and certain else ():
            text += self._accept(Sampled(token_id), room)
            if self.finish_reason:
                break
        return text

    def _accept(self, sampled: Sampled, room: int, noted: bool = False) -> str:
        if sampled.token_id == EMPTY:
            if self.constraint:
                self.constraint.check()
            return self.finish("grammar")
        if sampled.token_id in self._eos_ids:
            self._end = None if sampled.logprob is None else self._named(sampled, sampled.logprob)
            return self.finish("stop")
        self.sampler.accept(sampled.token_id, noted)
        self.tokens.append(sampled.token_id)
        if sampled.logprob is not None:
            self._logprobs.append(self._named(sampled, sampled.logprob))
        piece, stopped = self._stops.push(self._decoder.push(sampled.token_id) if self._decoder else "")
        self._text.append(piece)
        if stopped:
            self.finish_reason = "stop"
        elif self.constraint and self.constraint.accept(sampled.token_id):
            return piece + self.finish("stop")
        elif self.n_tokens >= room:
            return piece + self.finish("length")
        return piece

    def draft(self, proposal: list[int]) -> tuple[list[int], list[Any], Callable[[], None] | None]:
        """Return the draft tokens that may be here, the mask after each, and a function that computes these masks; no
        masks if the text has no form."""
        if not self.constraint:
            return proposal, [], None
        proposal = proposal[: self.constraint.possible(proposal)]
        masks = [np.zeros_like(self.constraint.words) for _ in proposal]
        return proposal, masks, partial(self.constraint.prepare_draft, proposal, masks)

    def finish(self, reason: str) -> str:
        """Set the finish reason and return the text that was held back until now."""
        rest, stopped = self._stops.push(self._decoder.flush() if self._decoder else "")
        rest += "" if stopped else self._stops.flush()
        self._text.append(rest)
        self.finish_reason = "stop" if stopped else reason
        return rest

    def choice(self) -> Choice:
        """Return the outcome of this sample."""
        logprobs = tuple(self._logprobs) if self._logprobs else None
        ids = tuple(self.tokens[self._prompt_tokens :])
        return Choice(self.index, "".join(self._text), ids, self.finish_reason, logprobs, self.score,
                      self._stops.found, self._end)

    def since(self, texts: int, logprobs: int) -> tuple[Delta, int, int]:
        """Return the parts after so many texts and log-probabilities, and the new numbers; from any thread."""
        reason = self.finish_reason  # read first: it is set after the values that are read below
        new, named = self._text[texts:], tuple(self._logprobs[logprobs:])
        delta = Delta(self.index, "".join(new), named, reason, self._end if reason else None)
        return delta, texts + len(new), logprobs + len(named)

    def tokens_since(self, pieces: int, ids: int, logprobs: int) -> tuple[Tokens, tuple[int, int, int]]:
        """Return the parts after so many pieces, tokens and log-probabilities, and the new numbers; from any thread.

        `_accept` adds a token before its log-probability and its text, so that both are there for each piece.
        """
        reason = self.finish_reason  # read first: it is set after the values that are read below
        new = self._text[pieces:]
        end = pieces + len(new)
        tokens = self.tokens[self._prompt_tokens + ids : self._prompt_tokens + end]
        named = tuple(self._logprobs[logprobs : logprobs + len(tokens)])
        found = Tokens(new, tokens, named, reason, self._end if reason else None, self._stops.found if reason else None)
        return found, (end, ids + len(tokens), logprobs + len(named))

    def _named(self, sampled: Sampled, logprob: float) -> TokenLogprob:
        """Return a token's log-probability with the texts of all tokens that it names."""
        text = self._tokenizer.token_text if self._tokenizer else lambda token_id: ""
        top = tuple(TopLogprob(token_id, text(token_id), value) for token_id, value in sampled.top)
        return TokenLogprob(sampled.token_id, text(sampled.token_id), logprob, top)
