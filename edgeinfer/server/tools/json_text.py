"""JSON that arrives in pieces: checked and passed on as it comes."""

from __future__ import annotations

import json
import re
from typing import Any

from .source import Malformed, Sink, Source, Steps

(VALUE, ITEM_OR_END, KEY_OR_END, KEY, COLON, NEXT, STRING, ESCAPE, HEX, SCALAR) = range(10)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
NUMBERS = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?,[ \n]*)+")
"""Numbers of a list, each with its comma."""
_BRACKETS = re.compile(r"\[+")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class _Scanner:
    """Reads one JSON value.

    Two frequent slips of models are mended, so that the output is JSON: control characters in a string are
    escaped, and a backslash that begins no escape (as in a regular expression) becomes an escaped backslash.

    Attributes
    ----------
    done : the value is complete
    wrong : the next character cannot be part of it
    out : pieces that are read and not passed on
    pending : text that is read and not known to be right
    """

    def __init__(self) -> None:
        self.done = self.wrong = False
        self.out: list[str] = []
        self.pending = ""
        self._state = VALUE
        self._closers: list[str] = []
        self._scalar: list[str] = []
        self._in_key = False

    def __call__(self, text: str, at: int) -> int:
        """Read as much as belongs to the value, and return the position after it."""
        while at < len(text) and not self.done and not self.wrong:
            if self._state == STRING:
                at = self._string(text, at)
            elif self._state == SCALAR:
                at = self._in_scalar(text, at)
            elif self._state in (ESCAPE, HEX):
                at = self._escape(text[at], at)
            else:
                at = self._between(text, at)
        return at

    def rest(self) -> str:
        """Return the part of a value that the end of the text cuts and that was not passed on."""
        return "".join(self._scalar) + self.pending

    def _string(self, text: str, at: int) -> int:
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text
        self.out.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            self.out.append(char)
            self._state = COLON if self._in_key else NEXT
            self._value_ended()
        elif char == "\\":
            self._state, self.pending = ESCAPE, char
        else:
            self.out.append(json.dumps(char)[1:-1])
        return end + 1

    def _escape(self, char: str, at: int) -> int:
        """Read a character after a backslash; one that makes no escape is read again as a part of the string."""
        if self._state == ESCAPE and char in '"\\/bfnrt':
            self._pass(self.pending + char)
        elif (self._state == ESCAPE and char == "u") or (self._state == HEX and char in _HEX_DIGITS):
            self.pending += char
            self._state = HEX
            if len(self.pending) == len(r"\u0000"):
                self._pass(self.pending)
        else:
            self._pass("\\" + self.pending)
            return at
        return at + 1

    def _pass(self, text: str) -> None:
        self.out.append(text)
        self.pending, self._state = "", STRING

    def _in_scalar(self, text: str, at: int) -> int:
        end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
        self._scalar.append(text[at:end])
        if end < len(text):
            self.end()
        return end

    def end(self) -> None:
        """Complete a number or word, which has no end of its own."""
        if self._state == SCALAR and (whole := "".join(self._scalar)):
            if _WHOLE_SCALAR.fullmatch(whole):
                self.out.append(whole)
                self._scalar.clear()
                self._state = NEXT
                self._value_ended()
            else:
                self.wrong = True

    def _between(self, text: str, at: int) -> int:
        """Read space and the next sign of the structure."""
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            self.out.append(text[at:end])
        if end == len(text):
            return end
        char, state = text[end], self._state
        if char in "}]":
            fits = state in (NEXT, ITEM_OR_END, KEY_OR_END) and self._closers and self._closers[-1] == char
            return self._structure(char, NEXT, end) if fits else self._refuse(end)
        if state in (VALUE, ITEM_OR_END):
            return self._begin_value(text, end)
        if state == NEXT and char == ",":
            return self._structure(char, KEY if self._closers[-1] == "}" else VALUE, end)
        if state == COLON and char == ":":
            return self._structure(char, VALUE, end)
        if state in (KEY, KEY_OR_END) and char == '"':
            self._in_key = True
            return self._structure(char, STRING, end)
        return self._refuse(end)

    def _begin_value(self, text: str, at: int) -> int:
        char, self._in_key = text[at], False
        if char == '"':
            return self._structure(char, STRING, at)
        if char == "{":
            self._closers.append("}")
            return self._structure(char, KEY_OR_END, at)
        if char == "[":
            return self._many(_BRACKETS, text, at)
        if char in "-0123456789tfn":
            self._state = SCALAR
            return self._many(NUMBERS, text, at) if self._closers and self._closers[-1] == "]" else at
        return self._refuse(at)

    def _many(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        """Read several brackets, or several numbers of a list, at once: long lists are read ten times as fast."""
        if found := pattern.match(text, at):
            self.out.append(found.group())
            self._state = VALUE
            if pattern is _BRACKETS:
                self._closers += "]" * len(found.group())
                self._state = ITEM_OR_END
            return found.end()
        return at

    def _structure(self, char: str, state: int, at: int) -> int:
        self.out.append(char)
        self._state = state
        if char in "}]":
            self._closers.pop()
            self._value_ended()
        return at + 1

    def _value_ended(self) -> None:
        if self._state == NEXT and not self._closers:
            self.done = True

    def _refuse(self, at: int) -> int:
        self.wrong = True
        return at


def json_value(source: Source, sink: Sink) -> Steps[bool]:
    """Read one JSON value and pass it on as it comes; returns False if the text ends before it is complete.

    Raises
    ------
    Malformed
        The next character cannot be part of it; the valid part before it has been passed on.
    """
    scanner = _Scanner()
    while True:
        source.scan(scanner)
        if source.ended and not scanner.done and not scanner.wrong:
            scanner.end()
        if scanner.out:
            sink("".join(scanner.out))
            scanner.out.clear()
        if scanner.done:
            return True
        if scanner.wrong or source.ended:
            if rest := scanner.rest():
                sink(rest)
            if scanner.wrong:
                raise Malformed
            return False
        yield


def json_string(source: Source) -> Steps[str]:
    """Read a JSON string and return its value; raises `Malformed` for anything else."""
    if (yield from source.character()) != '"':
        raise Malformed
    parts: list[str] = []
    if not (yield from json_value(source, parts.append)):
        raise Malformed
    return str(json.loads("".join(parts)))


def parsed(text: str) -> Any:
    """Return the value of a JSON text; raises `ValueError` for anything else, and for one nested too deep."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)
