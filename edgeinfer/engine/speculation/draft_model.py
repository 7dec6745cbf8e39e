"""A smaller model that drafts for a larger one with the same tokenizer (arXiv 2211.17192), and shared drafter code.

It samples with the text's own sampler, whose random numbers depend on seed, sample, position and token id alone: where
both models find the same token likely, they sample the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import RequestError
from ...runner import DECODE, Segment
from ..task import shared
from .drafter import Drafter, Text

if TYPE_CHECKING:
    from ...runner import Cancellation, Runner, Sequence
    from ..sampler import Sampler

Forward = Callable[[list[int], list[list[int]], list[int], int], tuple[Any, list[list[int]]]]
"""Runs over tokens of some of the texts, given their indices, tokens, sample specs and the number of steps that may
follow; returns the last row of logits of each text and the tokens of the further steps."""
AT_ONCE = 16
"""Tokens of a text that are run together with other texts' at most."""


class DraftModel(Drafter):
    """Drafts with a model of its own, which follows the texts in sequences of its own.

    Parameters
    ----------
    runner : of the draft; its context holds the texts
    vocab_size : of the model that checks; no token after it is drafted
    kept : at most one sequence of earlier texts, which the next may begin like; shared by the drafters of a runner
    """

    name = "draft"

    def __init__(self, runner: Runner, vocab_size: int, kept: list[Sequence] | None = None):
        self._runner, self._vocab_size = runner, min(vocab_size, runner.model.vocab_size)
        self._held: dict[int, _Held] = {}
        self._kept = [] if kept is None else kept

    def unread(self, texts: Items[Text]) -> int:
        """Return how many tokens the draft has not seen: of a prompt once for all its samples."""
        new = [text for text in texts if text.key not in self._held]
        seen = sum(len(text.tokens) - len(self._held[text.key].sequence) for text in texts if text not in new)
        if not new or self._held:
            return max(0, seen)
        kept = shared(self._kept[0].tokens, new[0].tokens, len(new[0].tokens)) if self._kept else 0
        return max(0, seen) + len(new[0].tokens) - kept

    def catch_up(self, texts: Items[Text], cancel: Cancellation | None = None) -> None:
        """Run over all but the last few tokens of each text."""
        self._read(self._wanted(texts), cancel)

    def propose(self, texts: Items[Text], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Sample n tokens after each text; see `Drafter.propose`."""
        try:
            return self._propose(texts, n, cancel)
        except RequestError:  # its KV blocks are all held
            self._forget_kept()
            return [[] for _ in texts]

    def _propose(self, texts: Items[Text], n: int, cancel: Cancellation | None) -> list[list[int]]:
        wanted = self._wanted(texts)
        n = min([n, *(int(self._runner.config.ctx or 0) - len(text.tokens) + 1 for text in wanted)])
        proposals: list[list[int]] = []
        if wanted and n > 0:
            held = self._read(wanted, cancel)
            pending = [text.tokens[len(sequence) :] for text, (sequence, _) in zip(wanted, held, strict=True)]
            samplers = [text.sampler.for_draft(self._runner.model.vocab_size, n) for text in wanted]

            def forward(indices: list[int], ids: list[list[int]], sample_specs: list[int],
                     further: int) -> tuple[Any, list[list[int]]]:
                return self._forward([held[index].sequence for index in indices], ids, sample_specs, further, cancel)

            proposals = sampled(forward, samplers, pending, n, self._vocab_size)
            self._held |= {text.key: _Held(sequence, len(text.tokens))
                           for text, (sequence, _) in zip(wanted, held, strict=True)}
        found = {text.key: proposal for text, proposal in zip(wanted, proposals, strict=False)}
        return [found.get(text.key, []) for text in texts]

    def release(self, texts: Items[Text]) -> None:
        """Release the state of texts except the first one: a request that continues it need not read it again."""
        held = [self._held.pop(text.key).sequence for text in texts if text.key in self._held]
        if not held:
            return
        self._forget_kept()
        self._kept.append(held[0])
        for sequence in held[1:]:
            self._runner.release(sequence)

    def _forget_kept(self) -> None:
        while self._kept:
            self._runner.release(self._kept.pop())

    def _wanted(self, texts: Items[Text]) -> list[Text]:
        """Return the texts after which it can draft."""
        ctx = int(self._runner.config.ctx or 0)
        return [text for text in texts if len(text.tokens) <= ctx and self._readable(text)]

    def _read(self, texts: list[Text], cancel: Cancellation | None) -> list[_Held]:
        at_once = max(1, min(AT_ONCE, self._runner.config.prefill_chunk // max(len(texts), 1)))
        return [self._catch_up(text, at_once, cancel) for text in texts]

    def _readable(self, text: Text) -> bool:
        """Return whether the draft knows all tokens; those that were seen before need not be looked at again."""
        seen = self._held[text.key].agreed if text.key in self._held else 0
        return max(text.tokens[seen:], default=0) < self._runner.model.vocab_size

    def _catch_up(self, text: Text, at_once: int, cancel: Cancellation | None) -> _Held:
        """Bring the draft's sequence up to the last few tokens of a text, forgetting wrong draft tokens."""
        sequence, agreed = self._held.get(text.key) or self._begin(text)
        most = min(len(sequence), len(text.tokens) - 1)
        same = min(agreed, most)
        while same < most and sequence.tokens[same] == text.tokens[same]:
            same += 1
        same = self._runner.can_truncate(sequence, same)
        self._runner.truncate(sequence, same)
        self._held[text.key] = _Held(sequence, same)
        while (left := len(text.tokens) - len(sequence)) > at_once:
            n = min(left - 1, self._runner.config.prefill_chunk)
            self._runner.forward([Segment(sequence, text.tokens[len(sequence) :][:n])], cancel)
        self._runner.checkpoint(sequence)
        return self._held[text.key]

    def _begin(self, text: Text) -> _Held:
        """Return a sequence for a text, a copy of another's if there is one: they have the prompt in common."""
        if self._kept:
            return _Held(self._kept.pop(), 0)
        for sequence, _ in self._held.values():
            return _Held(self._runner.fork(sequence), 0)
        return _Held(self._runner.new_sequence(), 0)

    def _forward(self, sequences: list[Sequence], ids: list[list[int]], sample_specs: list[int], further: int,
              cancel: Cancellation | None) -> tuple[Any, list[list[int]]]:
        if all(len(own) == 1 for own in ids):
            ends = [len(sequence) + 1 for sequence in sequences]
            rows = self._runner.decode(sequences, [own[0] for own in ids], cancel, sample_specs, further)
            return rows, [sequence.tokens[end:] for sequence, end in zip(sequences, ends, strict=True)]
        return self._runner.forward([Segment(sequence, own, (len(own) - 1,), DECODE, None, (spec,))
                                  for sequence, own, spec in zip(sequences, ids, sample_specs, strict=True)], cancel), \
            [[] for _ in sequences]


class _Held(NamedTuple):
    """State of a text in the draft model."""

    sequence: Sequence
    agreed: int
    """Number of first tokens of the sequence that are known to be those of the text."""


def sampled(forward: Forward, samplers: list[Sampler], pending: list[list[int]], n: int,
          vocab_size: int) -> list[list[int]]:
    """Sample up to n tokens after several texts, all together; the last one needs no forward pass of its own.

    Parameters
    ----------
    forward : see `Forward`
    samplers : of these draft tokens alone (`Sampler.for_draft`)
    pending : the last tokens of each text, which are not run yet
    n : tokens of a draft token; less where the text ends before
    vocab_size : tokens from there on are not drafted, and nothing after them
    """
    proposals: list[list[int]] = [[] for _ in samplers]
    live, ids = list(range(len(samplers))), pending
    while live:
        further = n - 1 - len(proposals[live[0]])
        rows, chosen = forward(live, ids, [samplers[index].address for index in live], further)
        going = []
        for index, row, more in zip(live, rows, chosen, strict=True):
            sampler, proposal = samplers[index], proposals[index]
            for token in more:
                sampler.accept(token, noted=True)
            proposal += (*more, sampler.sample(row).token_id)
            strange = next((i for i, token in enumerate(proposal) if not 0 <= token < vocab_size), None)
            if strange is not None:  # another model's token, or none: the mask left nothing
                del proposal[strange:]
            elif len(proposal) < n and proposal[-1] not in sampler.ends:
                sampler.accept(proposal[-1])
                going.append(index)
        live, ids = going, [[proposals[index][-1]] for index in going]
    return proposals
