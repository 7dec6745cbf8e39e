"""What a runner may have beside a model: readers of weights in storage, FFNs of which tokens compute a part."""

from __future__ import annotations

from typing import Any, Protocol


class WeightReader(Protocol):
    """Reads weights from storage while tokens flow."""

    walks: int
    """Forward passes that it has read for."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, those ahead of the next forward pass included."""

    @property
    def bytes_per_walk(self) -> int:
        """Bytes that a whole forward pass reads, where layers take turns in memory; 0 where tokens choose."""

    @property
    def hits(self) -> tuple[int, ...]:
        """Tokens decoded, and what they wanted that was in memory and that was not; empty where layers take turns."""

    @property
    def direct(self) -> bool:
        """Whether reads go past the system's page cache."""


class SparseNeurons(Protocol):
    """How FFNs run that are stored neuron by neuron."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The mode of each layer."""

    def layers(self) -> tuple[tuple[str, float], ...]:
        """Return the mode and the density of each layer, as the estimator takes them."""

    def sentence(self) -> str:
        """Return what runs otherwise than asked for, empty where nothing does."""

    def report(self) -> dict[str, Any]:
        """Return a JSON object."""
