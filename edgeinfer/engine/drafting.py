"""What guesses tokens: the face of drafters (speculative decoding, arXiv 2211.17192, section 2).

A drafter guesses how texts go on, the model checks all guesses in one walk, and what it would have drawn itself stays:
a text never depends on its drafter. Trained heads that a bundle brings would be one more drafter.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..runner import Cancellation, Sequence
    from .sampling import Sampler


class Text(Protocol):
    """A text that is being written, as drafters see it. Nothing of it is theirs to change."""

    @property
    def index(self) -> int:
        """Which of its request's samples it is."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and what was generated so far; it grows, and no token of it ever changes."""

    @property
    def sampler(self) -> Sampler:
        """Draws its tokens, and has taken note of all of them."""

    @property
    def sequence(self) -> Sequence | None:
        """What the model that checks holds of it: all tokens but the last."""


class Drafter(abc.ABC):
    """Guesses the next tokens of the samples of one request."""

    name: str
    """One of `config.SPECULATIONS`."""
    free: bool = False
    """Whether guesses cost next to nothing: they are also made where no walk checks them, to learn how many are right.
    """

    def level(self, text: Text) -> int:
        """Return how sure the guess would be, in steps that only this drafter knows; 0: it has none.

        Asked before each `guess`. How many guesses are right is counted for each level by itself.
        """
        return 1

    def prior(self, level: int) -> float:
        """Return the share of guesses of a level that are expected to be right before any was checked."""
        return 0.65

    def unread(self, texts: Items[Text]) -> int:
        """Return how many tokens of the texts `catch_up` would read."""
        return 0

    def catch_up(self, texts: Items[Text], cancel: Cancellation | None = None) -> None:  # noqa: B027
        """Read what is new in the texts before `guess`, which does it otherwise; raises as `guess`."""

    @abc.abstractmethod
    def guess(self, texts: Items[Text], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Guess up to n tokens, one or more, that follow each of the texts.

        Returns
        -------
        list of list of int
            For each text up to n tokens of the model's vocabulary; none where nothing comes to mind.

        Raises
        ------
        CancelledError
            It was cancelled. The texts are as before, and what the drafter keeps is right.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give back what is kept for these texts. Callable twice, and at any time between two guesses."""
