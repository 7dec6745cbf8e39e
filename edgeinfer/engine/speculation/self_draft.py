"""A model that drafts for itself, with a part of itself (arXiv 2309.08168)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from .draft_model import sampled
from .drafter import Drafter, Text

if TYPE_CHECKING:
    from ...runner import Cancellation, DraftRunner, Runner


class SelfDraft(Drafter):
    """Drafts with a cheaper program on the runner's sequences; keeps no sequences itself.

    Parameters
    ----------
    runner : checks
    ahead : draft tokens
    """

    name = "self"

    def __init__(self, runner: Runner, ahead: DraftRunner):
        self._runner, self._ahead = runner, ahead

    def propose(self, texts: Items[Text], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Sample n tokens after each text; see `Drafter.propose`."""
        sequences = [text.sequence for text in texts if text.sequence is not None]
        n = min([n, *(int(self._runner.config.ctx or 0) - len(sequence) for sequence in sequences)])
        if len(sequences) < len(texts) or n < 1:
            return [[] for _ in texts]
        vocab_size, gone = self._ahead.vocab_size, [0] * len(texts)

        def forward(indices: list[int], ids: list[list[int]], sample_specs: list[int],
                 further: int) -> tuple[Any, list[list[int]]]:
            own = [sequences[index] for index in indices]
            offset = gone[indices[0]]
            rows, chosen = self._ahead.ahead(own, [own[-1] for own in ids], sample_specs, offset, further, cancel)
            for index in indices:
                gone[index] = offset + 1 + len(chosen[0])
            return rows, chosen

        try:
            return sampled(forward, [text.sampler.for_draft(vocab_size, n) for text in texts],
                         [text.tokens[-1:] for text in texts], n, vocab_size)
        finally:
            for sequence in sequences:  # the room after its end
                self._runner.truncate(sequence, len(sequence))

    def release(self, texts: Items[Text]) -> None:
        """Nothing is kept."""


class DraftHead(SelfDraft):
    """Drafts with a head of the model that was trained to (multi-token prediction)."""

    name = "mtp"
