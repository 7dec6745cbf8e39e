"""What a technique that processes prompts in its own way offers to a runner."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .runner import Cancellation, Logits
    from .sequences import Sequence


class PromptReport(Protocol):
    """What became of a prompt; its text is for people."""

    def report(self) -> dict[str, Any]:
        """Return it as a JSON object."""


class PrefillStrategy(Protocol):
    """A way of processing prompts."""

    @property
    def last(self) -> PromptReport | None:
        """What became of the last prompt."""

    def takes(self, ids: Items[int]) -> bool:
        """Return whether it processes a prompt; the runner does so with others."""

    def prefill(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None, draw: int,
                told: Callable[[int, int], None] | None = None) -> Logits:
        """Process a prompt; see `Runner.prefill`."""

    def share(self, layer: int) -> float:
        """Return which share of the last prompt's tokens went through a layer."""
