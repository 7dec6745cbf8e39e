"""Companions of a runner: the cancellation of a request, readers of weights, sparse FFNs, drafts by a part of it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .sequences import Sequence

    Logits = NDArray[np.float32]


class Cancellation:
    """The wish to end one request.

    `cancel` may come from any thread and from signal handlers, and at any time: before its first pass, between two of
    them, within one, and after the last, when it has no effect.
    """

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False

    def cancel(self) -> None:
        """End the request."""
        self.asked = True


class WeightReader(Protocol):
    """Reads weights from storage while tokens flow."""

    passes: int
    """Forward passes that it has read for."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, those ahead of the next forward pass included."""

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a whole forward pass reads if layers are streamed; 0 if tokens select the reads."""

    @property
    def hits(self) -> tuple[int, ...]:
        """Decoded tokens, cache hits and cache misses; empty if layers are streamed."""

    @property
    def direct(self) -> bool:
        """True if reads go past the system's page cache."""


class SparseNeurons(Protocol):
    """Execution of FFNs that are stored neuron by neuron."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The mode of each layer."""

    def layers(self) -> tuple[tuple[str, float], ...]:
        """Return the mode and the density of each layer, as the estimator takes them."""

    def sentence(self) -> str:
        """Return the parts that run otherwise than requested, empty if there are none."""

    def report(self) -> dict[str, Any]:
        """Return a JSON object."""


class DraftRunner(Protocol):
    """A cheaper part of a runner that continues the runner's own sequences, to draft its next tokens."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it may draft, the first ones of the vocabulary."""

    def ahead(self, sequences: Items[Sequence], ids: Items[int], sample_specs: Items[int], offset: int, further: int,
              cancel: Cancellation | None = None) -> tuple[Logits, list[list[int]]]:
        """Run over one token of each sequence, and on with those that it samples; the sequences stay as they are.

        Parameters
        ----------
        sequences, ids, sample_specs : one token and one sample (`Segment.sample_specs`) for each
        offset : tokens after the ends of the sequences that were run so before. The passes from offset 0 on that
            belong together follow each other, with nothing in between; the first says how many follow in all
        further : how many more tokens are wanted

        Returns
        -------
        rows : float32 array of shape (len(sequences), vocab_size)
            Logits after the last token of each, valid until the next forward pass.
        chosen : list of list of int
            Up to `further` tokens that the pass decoded by itself, the same number for each sequence.
        """
