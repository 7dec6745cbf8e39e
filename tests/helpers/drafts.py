"""Texts as drafters see them, and the texts that their models would have written."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Sampler
from edgeinfer.runner import Sequence
from edgeinfer.runtime import Session

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "default": {},
    "repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": 0.5, "temperature": 1.3},
    "bias": {"logit_bias": {3: 4.0, 7: float("-inf")}, "logprobs": 2},
}
"""Of requests, greedy and sampled, with each penalty."""


_keys = count()


class Written:
    """A text that a session writes."""

    usage = None

    def __init__(self, session: Session, prompt: list[int], index: int = 0, ends: Iterable[int] = (), room: int = 64,
                 **settings: Any):
        self.key, self.tokens, self.prompt_tokens = next(_keys), list(prompt), len(prompt)
        self.sampler = Sampler(GenerationConfig(**settings), session.model.vocab_size, 5, index, len(prompt) + room,
                               ends)
        self.sampler.prompt(prompt)
        self.sequence: Sequence | None = session.new_sequence()
        self._session = session
        session.prefill(self.sequence, prompt[:-1] or prompt)

    def write(self, n: int) -> list[int]:
        """Go on by n tokens, one by one; returns them."""
        assert self.sequence
        for _ in range(n):
            row = self._session.decode([self.sequence], [self.tokens[-1]], sample_specs=[self.sampler.address])[0]
            self.tokens.append(self.sampler.sample(row).token_id)
            self.sampler.accept(self.tokens[-1])
        return self.tokens[len(self.tokens) - n :]

    def take(self, ids: list[int]) -> None:
        """Go on with these tokens."""
        assert self.sequence
        for token in ids:
            self._session.decode([self.sequence], [self.tokens[-1]])
            self.tokens.append(token)
            self.sampler.accept(token)

    def ahead(self, n: int) -> list[int]:
        """Return the next n tokens, up to one that ends the text, without writing them."""
        assert self.sequence
        sequence, sampler, tokens = self._session.fork(self.sequence), self.sampler.fork(), [self.tokens[-1]]
        while len(tokens) <= n and (len(tokens) == 1 or tokens[-1] not in sampler.ends):
            tokens.append(sampler.sample(self._session.decode([sequence], tokens[-1:])[0]).token_id)
            sampler.accept(tokens[-1])
        self._session.release(sequence)
        return tokens[1:]
