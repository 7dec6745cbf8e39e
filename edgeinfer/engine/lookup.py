"""Prompt lookup: what followed the last tokens where they stood before follows again (Saxena, 2023; arXiv 2304.04487).

It costs nothing but microseconds, and is right where a text repeats its prompt or itself: summaries, code that is
edited, lists, tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from .drafting import Drafter, Text

if TYPE_CHECKING:
    from ..runner import Cancellation

SIZES = (8, 4, 2)
"""Tokens that must have stood together before; the longer ones are looked for first."""
LENGTHS = (2, 3, 5, 9)
"""Tokens in common with the place before, at least, of level 1, 2, ...: the more, the likelier the next one is too."""
PRIORS = (0.35, 0.45, 0.6, 0.9)
"""Share of guesses of each level that were right in real texts (docs/speculative.md)."""
_NOWHERE = -1


class PromptLookup(Drafter):
    """Guesses what followed the last tokens of a text at their latest occurrence before, in constant time a token."""

    name = "lookup"
    free = True

    def __init__(self) -> None:
        self._indices: dict[int, Index] = {}

    def level(self, text: Text) -> int:
        """Return how many of `LENGTHS` the last tokens have in common with those of the place found."""
        index = self._indices.get(text.index)
        if index is None:
            index = self._indices[text.index] = Index(text.tokens)
        return index.level()

    def prior(self, level: int) -> float:
        """Return what was measured in real texts."""
        return PRIORS[level - 1]

    def guess(self, texts: Items[Text], n: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Return what followed, for each text; see `Drafter.guess`."""
        return [self._indices[text.index].continuation(n) if self.level(text) else [] for text in texts]

    def release(self) -> None:
        """Forget all texts."""
        self._indices.clear()


class Index:
    """Where each n-gram of a growing text stood last.

    Parameters
    ----------
    tokens : the text; it may grow, and is read from where it ended before
    """

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._read = 0
        self._places = {size: array("i", [_NOWHERE]) for size in SIZES}
        self._found = _NOWHERE

    def level(self) -> int:
        """Read what is new and look for the last tokens; see `PromptLookup.level`."""
        self._read_on()
        return sum(self._in_common() >= length for length in LENGTHS) if self._found != _NOWHERE else 0

    def continuation(self, n: int) -> list[int]:
        """Return n tokens that followed; where the text ends there, they go on with themselves."""
        following = self._tokens[self._found + 1 : self._found + 1 + n]
        while len(following) < n:
            following.extend(following[: n - len(following)])
        return following

    def _read_on(self) -> None:
        tokens = self._tokens
        if self._read == len(tokens):
            return
        for size, places in self._places.items():
            if len(places) < 2 * len(tokens):  # places of n-grams whose numbers agree overwrite each other
                self._places[size] = places = array("i", [_NOWHERE]) * (1 << (4 * len(tokens)).bit_length())
                self._note(size, places, size - 1, len(tokens) - 1)
            else:
                self._note(size, places, max(self._read, size - 1), len(tokens) - 1)
        self._found = _NOWHERE
        last = len(tokens) - 1
        for size, places in self._places.items():
            if last < size - 1:
                continue
            gram, mask = tuple(tokens[last - size + 1 : last + 1]), len(places) - 1
            place = places[hash(gram) & mask]
            places[hash(gram) & mask] = last
            if self._found == _NOWHERE and place != _NOWHERE and tokens[place - size + 1 : place + 1] == list(gram):
                self._found = place
        self._read = len(tokens)

    def _note(self, size: int, places: array[int], first: int, stop: int) -> None:
        tokens, mask = self._tokens, len(places) - 1
        for last in range(first, stop):
            places[hash(tuple(tokens[last - size + 1 : last + 1])) & mask] = last

    def _in_common(self) -> int:
        """Tokens before the place found that are those at the end, at most the most that a level asks for."""
        tokens, last = self._tokens, len(self._tokens) - 1
        most = min(LENGTHS[-1], self._found + 1)
        return next((i for i in range(most) if tokens[self._found - i] != tokens[last - i]), most)
