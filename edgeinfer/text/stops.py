"""Stop strings, found while text arrives in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterable

from ..base.validation import TEXTS, checked


class StopStrings:
    """Passes text through until the first stop string is complete; the stop string itself is dropped.

    Generation stops at the earliest character that completes a stop string, so the result does not depend on how
    the text is cut into pieces. Of several stop strings that end at this character the longest is dropped.

    Parameters
    ----------
    stops : strings, each not empty

    Raises
    ------
    UsageError
        A stop string is empty or no string.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self._stops: tuple[str, ...] = checked("stop", stops, TEXTS)
        self._held = ""
        self.found: str | None = None
        """The stop string that was seen; all later text is dropped."""

    @property
    def stopped(self) -> bool:
        """True if a stop string has been seen."""
        return self.found is not None

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of text; return the text that may be shown now and whether a stop string was completed.

        Only the longest suffix that may still become a stop string is held back.
        """
        if self.found is not None:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held, self.found = "", text[start:end]
            return text[:start], True
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """Return the text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` with which `stop` begins (`stop` itself is not in `text`)."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
