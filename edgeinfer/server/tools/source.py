"""Text that arrives in pieces, read by generators that wait for more.

Each method that reads is a generator: it yields when it needs text that has not arrived, and returns the read text.
Text that has been read is never searched again, so the time is linear in the length of the text however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], object]
SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text here is not a call after all; it never leaves the package."""


class Source:
    """The unread end of a text.

    Attributes
    ----------
    ended : bool
        No more text will arrive.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._kept: list[str] | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        """Add text that has arrived."""
        self._text, self._at = self._text[self._at:] + text, 0

    def keep(self, text: str) -> None:
        """Remember the text read from here on, and `text` before it, until `kept`."""
        self._kept = [text]

    def kept(self) -> str:
        """Return the text read since `keep` and forget it; empty if that was done before."""
        text, self._kept = "".join(self._kept or ()), None
        return text

    def take(self, count: int) -> str:
        """Read characters that have arrived."""
        text = self._text[self._at:self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(text)
        return text

    def back(self, count: int) -> None:
        """Make the last characters that were read unread; only where none are kept."""
        self._at -= count

    def next(self) -> str:
        """Return the next character without reading it; empty if it has not arrived."""
        return self._text[self._at:self._at + 1]

    def character(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at:self._at + 1]

    def scan(self, scanner: Callable[[str, int], int]) -> None:
        """Let a scanner read the text that has arrived: it takes the text and the position, and returns the next
        position."""
        self.take(scanner(self._text, self._at) - self._at)

    def burst(self, pattern: re.Pattern[str]) -> str:
        """Read the longest prefix of the arrived text that a pattern matches, and return it."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Read as far as the characters match, and return them; `characters` is a repeated class such as ``[a-z]*``."""
        parts = []
        while True:
            parts.append(self.burst(characters))
            if self._at < len(self._text) or self.ended:
                return "".join(parts)
            yield

    def standing(self, *texts: str) -> Steps[str]:
        """Return the first of these texts that stands here, without reading it; empty if none does."""
        for text in texts:
            while not self.ended and len(self._text) - self._at < len(text) and text.startswith(self._text[self._at:]):
                yield
            if self._text.startswith(text, self._at):
                return text
        return ""

    def literal(self, *texts: str) -> Steps[str]:
        """Read one of these texts and return it, or return nothing.

        The beginning of one is read where the text ends: it is a marker that was cut.
        """
        found = yield from self.standing(*texts)
        if found:
            self.take(len(found))
        elif self.ended and any(text.startswith(self._text[self._at:]) for text in texts):
            self.take(len(self._text) - self._at)
        return found

    def until(self, ends: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Read up to and with the first of these ends, and return it; empty if the text ends before.

        Text before the end goes to the sink as it arrives, except a possible beginning of an end.
        """
        pattern = _any_of(ends)
        while True:
            found = pattern.search(self._text, self._at)
            stop = found.start() if found else len(self._text) if self.ended else self._undecided(ends)
            if stop > self._at:
                sink(self.take(stop - self._at))
            if found:
                return self.take(len(found.group()))
            if self.ended:
                return ""
            yield

    def _undecided(self, ends: tuple[str, ...]) -> int:
        """Return where the beginning of an end stands at the end of the text; the length of the text if nowhere."""
        longest = max(map(len, ends), default=1)
        for at in range(max(self._at, len(self._text) - longest + 1), len(self._text)):
            if any(end.startswith(self._text[at:]) for end in ends):
                return at
        return len(self._text)


@lru_cache(maxsize=64)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
