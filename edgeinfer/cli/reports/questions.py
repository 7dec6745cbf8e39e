"""Further questions of `edgeinfer estimate` about a device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...base.dataclass import dataclass
from ...config import DEFAULT_DRAFT_TOKENS

if TYPE_CHECKING:
    from ...models.description import ModelDescription
    from ..lengths import Lengths

DEFAULT_ANSWER = 128
"""Tokens of an answer, for users."""


@dataclass(frozen=True)
class Questions:
    """Further questions about a device."""

    users: int | None = None
    """Number of concurrent users."""
    answer: int | None = None
    """Tokens of an answer whose time is asked for."""
    bounds: tuple[tuple[str, float], ...] = ()
    """Limits of the goodput."""
    explain: bool = False
    """True if the formulas are wanted."""
    storage: str | None = None
    """Kind of the storage, where one was named."""
    sparsity: float | None = None
    """Share of zeros in the feed-forward networks."""
    row_bytes: int | None = None
    """Bytes of a neuron; by default those of the model's."""
    draft: ModelDescription | None = None
    """A second model that drafts."""
    acceptance: float | None = None
    """Share of its tokens that are accepted."""
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    """Most of them in a pass."""
    energy: bool = False
    """True if energy is asked about by itself."""
    lookup: bool = False
    """True if prompt lookup is asked about."""
    reply: int = DEFAULT_ANSWER
    """Tokens of an answer of each user."""
    notes: tuple[str, ...] = ()
    """Remarks on the lengths."""
    plots: bool = False
    """True if the figures of plots are wanted: other numbers of users, and other acceptances."""

    @property
    def tokens(self) -> int | None:
        """Tokens of an answer, where a question is about one."""
        return self.answer or (DEFAULT_ANSWER if self.users else None)

    def within(self, lengths: Lengths) -> Questions:
        """Return the questions about an answer as long as the context allows."""
        return replace(self, answer=self.answer and lengths.answer, reply=lengths.answer or DEFAULT_ANSWER,
                       notes=lengths.notes)
