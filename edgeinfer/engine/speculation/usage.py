"""Statistics of speculation in one request."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..completion import SpeculationReport

if TYPE_CHECKING:
    from .drafter import Text


@dataclass(slots=True, eq=False)
class Usage:
    """Figures of speculation for the samples of one request."""

    passes: int = 0
    """Forward passes that verified draft tokens."""
    texts: int = 0
    """Samples that took part in them, counted once for each pass."""
    tokens: int = 0
    """Tokens that these passes gave."""
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)
    """Number of times that the first draft token was right, the second, ..."""
    seconds: float = 0.0
    """Seconds of all forward passes that gave tokens."""
    instead: float = 0.0
    """Seconds that the same tokens take without speculation."""

    def verified(self, drafted: int, right: int) -> None:
        """Record of a sample's draft tokens in a forward pass, and of how many were right."""
        self.texts += 1
        self.tokens += 1 + right
        self.drafted += drafted
        self.accepted += [0] * (right - len(self.accepted))
        for place in range(right):
            self.accepted[place] += 1

    def report(self, drafter: str, state: str) -> SpeculationReport:
        """Return the statistics; see `SpeculationReport` for the parameters."""
        return SpeculationReport(
            drafter, state, self.passes, self.drafted, sum(self.accepted), tuple(self.accepted),
            self.tokens / self.texts if self.passes else None,
            self.instead / self.seconds if self.passes and self.instead else None)


def usages_of(texts: Items[Text]) -> Items[Usage]:
    """Return the statistics of the requests whose texts took part in a pass."""
    return tuple({id(text.usage): text.usage for text in texts if text.usage}.values())


def count_verified(texts: Items[Text], proposals: Items[list[int]], accepted: Items[int]) -> None:
    """Record a pass that verified drafts, and how many tokens of each text were right."""
    for text, proposal, right in zip(texts, proposals, accepted, strict=True):
        if text.usage:
            text.usage.verified(len(proposal), right)
    for usage in usages_of(texts):
        usage.passes += 1
