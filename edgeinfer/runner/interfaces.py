"""Companions of a runner: the cancellation of a request, readers of weights in storage, and sparse FFNs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
        """Bytes that a whole forward pass reads if layers are streamed; 0 if tokens select what is read."""

    @property
    def hits(self) -> tuple[int, ...]:
        """Decoded tokens, cache hits and cache misses; empty if layers are streamed."""

    @property
    def direct(self) -> bool:
        """Whether reads go past the system's page cache."""


class SparseNeurons(Protocol):
    """Execution of FFNs that are stored neuron by neuron."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The mode of each layer."""

    def layers(self) -> tuple[tuple[str, float], ...]:
        """Return the mode and the density of each layer, as the estimator takes them."""

    def sentence(self) -> str:
        """Return what runs otherwise than asked for, empty if nothing does."""

    def report(self) -> dict[str, Any]:
        """Return a JSON object."""
