"""Interface of drafters (speculative decoding, arXiv 2211.17192, section 2).

A drafter proposes how texts continue, the model verifies all proposed tokens in one pass and keeps those that it would
have sampled itself: a text never depends on its drafter.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...runner import Cancellation, Sequence
    from ..sampler import Sampler
    from .usage import Usage


class Text(Protocol):
    """A text that is being written, as drafters see it. Nothing of it is theirs to change."""

    @property
    def key(self) -> int:
        """Return a value that no other text has."""

    @property
    def usage(self) -> Usage | None:
        """Return the statistics of its request, if there are any."""

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and the generated tokens so far; the list grows, and no token of it ever changes."""

    @property
    def sampler(self) -> Sampler:
        """Samples its tokens, and has taken note of all of them."""

    @property
    def sequence(self) -> Sequence | None:
        """Return its sequence in the model that verifies: all tokens but the last."""


class Drafter(abc.ABC):
    """Drafts the next tokens of texts that are written together."""

    name: str
    """One of `config.SPECULATIONS`."""
    free: bool = False
    """True if draft tokens cost next to nothing: they are also made where no pass checks them, to learn how many are
    right.
    """

    def level(self, text: Text) -> int:
        """Return how sure the draft token would be, in steps that only this drafter knows; 0: it has none.

        Asked before each `propose`. How many draft tokens are right is counted for each level by itself.
        """
        return 1

    def prior(self, level: int) -> float:
        """Return the share of draft tokens of a level that are expected to be right before any was checked."""
        return 0.65

    def unread(self, texts: Items[Text]) -> int:
        """Return how many tokens of the texts `catch_up` would read."""
        return 0

    def catch_up(self, texts: Items[Text], cancel: Cancellation | None = None) -> None:  # noqa: B027
        """Read the new tokens of the texts ahead of `propose`, which otherwise does it; raises as `propose`."""

    @abc.abstractmethod
    def propose(self, texts: Items[Text], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Draft up to n tokens, one or more, that follow each of the texts.

        Returns
        -------
        list of list of int
            For each text up to n tokens of the model's vocabulary; none if nothing comes to mind.

        Raises
        ------
        CancelledError
            It was cancelled. The texts are as before, and the drafter's state is consistent.
        """

    @abc.abstractmethod
    def release(self, texts: Items[Text]) -> None:
        """Release the state of texts. May be called twice, and for texts without state."""
