"""Prompt lookup: propose the tokens that followed an earlier occurrence of the last ones (Saxena, 2023; arXiv
2304.04487).

It costs microseconds and no memory to speak of, and is right where a text repeats its prompt or itself: summaries,
code that is edited, lists, tables.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from .drafter import Drafter, Text

if TYPE_CHECKING:
    from ...runner import Cancellation

SIZES = (8, 4, 2)
"""Tokens that must have stood together before; the longer ones are looked for first."""
LENGTHS = (2, 3, 5, 9)
"""Tokens in common with the place before, at least, of level 1, 2, ...: the more, the likelier the next one is too."""
PRIORS = (0.35, 0.45, 0.6, 0.9)
"""Share of draft tokens of each level that were right in real texts (docs/explanation/speculative.md)."""
_NOWHERE = -1
MAX_ID = 0x10FFFF
"""Highest number of a character."""


class PromptLookup(Drafter):
    """Proposes the tokens that followed the latest earlier occurrence of a text's last tokens."""

    name = "lookup"
    free = True

    def __init__(self) -> None:
        self._indices: dict[int, Index] = {}

    def level(self, text: Text) -> int:
        """Return how many of `LENGTHS` the last tokens have in common with those of the place found."""
        index = self._indices.get(text.key)
        if index is None:
            index = self._indices[text.key] = Index(text.tokens)
        return index.level()

    def prior(self, level: int) -> float:
        """Return the acceptance measured in real texts."""
        return PRIORS[level - 1]

    def propose(self, texts: Items[Text], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Return the tokens that followed, for each text; see `Drafter.propose`."""
        return [self._indices[text.key].continuation(n) if self.level(text) else [] for text in texts]

    def release(self, texts: Items[Text]) -> None:
        """Forget texts."""
        for text in texts:
            self._indices.pop(text.key, None)


class Index:
    """A growing text as a string with a character for each token, in which Python finds an n-gram within microseconds.

    Tokens are processed on demand, so a text without lookups costs nothing.

    Parameters
    ----------
    tokens : the text; it may grow, and is read from where it ended before
    """

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._text = ""
        self._found = _NOWHERE

    def level(self) -> int:
        """Read the new tokens and look for the last ones; see `PromptLookup.level`."""
        new = self._tokens[len(self._text) :]
        if new:
            self._text += _characters(new)
            self._found = self._latest()
        return sum(self._in_common() >= length for length in LENGTHS) if self._found != _NOWHERE else 0

    def continuation(self, n: int) -> list[int]:
        """Return n tokens that followed; where the text ends there, they continue with themselves."""
        following = self._tokens[self._found + 1 : self._found + 1 + n]
        while len(following) < n:
            following.extend(following[: n - len(following)])
        return following

    def _latest(self) -> int:
        """Return the last token of the latest place before the end that has the longest of `SIZES` in common with it.

        A longer n-gram ends where a shorter one does, so each search continues where the one before found something.
        """
        found, stop = _NOWHERE, len(self._text) - 1
        for size in reversed(SIZES):
            place = self._text.rfind(self._text[-size:], 0, stop) if size <= stop else _NOWHERE
            if place == _NOWHERE:
                break
            found = place + size - 1
            stop = found + 1
        return found

    def _in_common(self) -> int:
        """Tokens before the place found that are those at the end, at most the most that a level asks for."""
        tokens, last = self._tokens, len(self._tokens) - 1
        most = min(LENGTHS[-1], self._found + 1)
        return next((i for i in range(most) if tokens[self._found - i] != tokens[last - i]), most)


def _characters(tokens: list[int]) -> str:
    """Return a character for each token. If a vocabulary has more tokens than there are characters, two may share
    one: the draft token is then wrong, and the text is unchanged.
    """
    if max(tokens) > MAX_ID:
        tokens = [token % MAX_ID for token in tokens]
    return array("I", tokens).tobytes().decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
