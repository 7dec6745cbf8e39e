"""Interface of techniques that process prompts in their own way."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .interfaces import Cancellation, Logits
    from .sequences import Sequence


class PromptReport(Protocol):
    """Report on a processed prompt; its text is for people."""

    def report(self) -> dict[str, Any]:
        """Return it as a JSON object."""


class PrefillStrategy(Protocol):
    """A way of processing prompts."""

    @property
    def last(self) -> PromptReport | None:
        """Report on the last prompt."""

    def takes(self, ids: Items[int]) -> bool:
        """Return whether it processes a prompt; the runner does so with others."""

    def prefill(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None, spec: int,
                on_progress: Callable[[int, int], None] | None = None) -> Logits:
        """Process a prompt; see `Runner.prefill`."""

    def share(self, layer: int) -> float:
        """Return which share of the last prompt's tokens went through a layer."""
