"""Analysis of regular expressions: whether a match can contain one character directly after another.

That decides where a text can be cut between the words of a pre-tokenizer. The answer holds for every text: an
expression is read as the sequences of characters that its parts can begin and end with, and everything that looks at
more than the characters of a match is taken to contain any two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

_ATOM = re.compile(r"\\[pP]\{\^?\w+\}|\\[sSdDwWrntfv]|\\[^\w\s]|[^\\\[\](){}?*+|^$]", re.DOTALL)
"""One character, or an escape that stands for one; a class in brackets may contain others and is read by itself."""
_REPEAT = re.compile(r"[*+?]|\{\d+(,\d*)?\}|\{,\d+\}")
_GROUP = re.compile(r"\((?:\?i?:)?(?!\?)")
_ASSERTIONS = (r"(?!\S)", "$")
"""Understood ones, which look at the next character: white space or none, and the end of a line."""


class _Unknown(Exception):
    """The expression has something that is not understood, or a match can contain the two characters."""


class _Part(NamedTuple):
    """A part of an expression, described by its possible matches."""

    empty: bool
    first: bool
    """True if one may begin with a character that must not follow another."""
    last: bool
    """True if one may end with a character after which it must not be."""


class _Reader:
    def __init__(self, pattern: str, first: Callable[[str], bool], last: Callable[[str], bool]):
        self._pattern, self._at, self._first, self._last = pattern, 0, first, last

    def choice(self, inside: bool = False) -> _Part:
        """Read alternatives up to the end, or to the end of a group."""
        found = [self._sequence()]
        while self._next("|"):
            found.append(self._sequence())
        if inside != self._next(")") or (not inside and self._at < len(self._pattern)):
            raise _Unknown
        return _Part(*map(any, zip(*found, strict=True)))

    def _sequence(self) -> _Part:
        whole = _Part(True, False, False)
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            whole = _joined(whole, self._repeated(self._single()))
        return whole

    def _repeated(self, part: _Part) -> _Part:
        while found := _REPEAT.match(self._pattern, self._at):
            self._at = found.end()
            if found[0] != "?":
                part = _joined(part, part)
            part = part._replace(empty=part.empty or found[0].startswith(("?", "*", "{0", "{,")))
        return part

    def _single(self) -> _Part:
        if any(map(self._next, _ASSERTIONS)):
            return _Part(True, True, False)
        if group := _GROUP.match(self._pattern, self._at):
            self._at = group.end()
            return self.choice(inside=True)
        end = self._class() if self._pattern[self._at] == "[" else \
            found.end() if (found := _ATOM.match(self._pattern, self._at)) else None
        if end is None:
            raise _Unknown
        atom, self._at = self._pattern[self._at : end], end
        return _Part(False, self._first(atom), self._last(atom))

    def _class(self) -> int | None:
        """Return where the class in brackets ends that begins here; classes may contain classes."""
        depth = 0
        for found in re.compile(r"\\.|[\[\]]", re.DOTALL).finditer(self._pattern, self._at):
            depth += {"[": 1, "]": -1}.get(found[0], 0)
            if not depth:
                return found.end()
        return None

    def _next(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found


def _joined(left: _Part, right: _Part) -> _Part:
    if left.last and right.first:
        raise _Unknown
    return _Part(left.empty and right.empty, left.first or (left.empty and right.first),
                 right.last or (right.empty and left.last))


def separates(pattern: str, left: str, right: str) -> bool:
    """Return whether no match can contain a character of `left` and, directly after it, one of `right`.

    Then a text may be cut between two such characters: matches on either side do not depend on the other one.
    """
    try:
        return not _Reader(pattern, _matching(right), _matching(left)).choice().empty
    except (_Unknown, RecursionError):
        return False


def matches_each(pattern: str, characters: str) -> bool:
    """Return whether the expression matches each of these characters, which are no line feeds, where it is alone."""
    lines = rf"(?:(?!\n)(?<![^\n])(?:{pattern})(?![^\n])|\n)+"
    return separates(pattern, characters, "\n") and not _unmatched(lines, "\n".join(characters))


def _matching(characters: str) -> Callable[[str], bool]:
    return lambda atom: _unmatched(f"(?:{atom})+", characters) < len(characters)


def _unmatched(pattern: str, text: str) -> int:
    """Return how many characters of a text no match contains."""
    from tokenizers import Regex, pre_tokenizers

    split: Any = pre_tokenizers.Split(Regex(pattern), "removed")
    return sum(len(piece) for piece, _ in split.pre_tokenize_str(text))
