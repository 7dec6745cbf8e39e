"""Gemma's calls, whose arguments look like JSON with bare keys and strings between markers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .answer import Answer
from .answer_format import AnswerFormat, end_marker
from .json_text import NUMBERS
from .schema import as_json
from .source import SPACE, Malformed, Steps

if TYPE_CHECKING:
    from .events import Tool
    from .lark import Lark

_NAME, _KEY, _BARE = re.compile(r"[^\s{<]*"), re.compile(r"[^:,{}\[\]]*"), re.compile(r"[^,}\]]*")
(_KEY_OR_END, _NEXT_KEY, _ITEM_OR_END, _VALUE, _NEXT) = range(5)


class _Arguments:
    """Arguments after their opening brace, while they are passed on as JSON."""

    def __init__(self, answer: Answer, quote: str):
        self._answer, self._source, self._out = answer, answer.source, answer.arguments
        self._quote = quote
        self._closers, self._state = ["}"], _KEY_OR_END

    def read(self) -> Steps[bool]:
        """Read to the closing brace; returns whether it came. Raises `Malformed` where something else stands."""
        source, state = self._source, -1
        self._out("{")
        while self._closers:
            char = source.next() or (yield from source.character())
            state = self._state
            if not char:
                return False
            if char.isspace():
                source.take(1)
            elif char in "}]":
                self._close(char)
            elif state == _NEXT:
                self._comma(char)
            elif state in (_KEY_OR_END, _NEXT_KEY):
                yield from self._key(char)
            elif char in "{[":
                self._sign(char, _KEY_OR_END if char == "{" else _ITEM_OR_END)
                self._closers.append("}" if char == "{" else "]")
            else:
                yield from self._value(char)
        return True

    def _sign(self, char: str, state: int) -> None:
        self._out(self._source.take(1))
        self._state = state

    def _close(self, char: str) -> None:
        if self._state not in (_KEY_OR_END, _ITEM_OR_END, _NEXT) or self._closers[-1] != char:
            raise Malformed
        self._closers.pop()
        self._sign(char, _NEXT)

    def _comma(self, char: str) -> None:
        if char != ",":
            raise Malformed
        self._sign(char, _NEXT_KEY if self._closers[-1] == "}" else _VALUE)

    def _key(self, char: str) -> Steps[None]:
        if not (yield from self._string(char)):
            key = (yield from self._source.run(_KEY)).strip()
            self._out(json.dumps(key, ensure_ascii=False))
        yield from self._source.run(SPACE)
        if (yield from self._source.literal(":")):
            self._out(":")
            self._state = _VALUE
        elif not self._source.ended:
            raise Malformed

    def _value(self, char: str) -> Steps[None]:
        if self._closers[-1] == "]" and (numbers := self._source.burst(NUMBERS)):
            self._out(numbers)
            self._state = _VALUE
            return
        if not (yield from self._string(char)):
            text = yield from self._source.run(_BARE)
            if not text.strip():
                raise Malformed
            self._out(text if self._source.ended and not self._source.next() else as_json(text.strip(), frozenset()))
        self._state = _NEXT

    def _string(self, char: str) -> Steps[bool]:
        """Read a string if one begins here."""
        if char != self._quote[0] or not (yield from self._source.literal(self._quote)):
            return False
        self._out('"')
        if (yield from self._source.until((self._quote,), self._escaped)):
            self._out('"')
        return True

    def _escaped(self, text: str) -> None:
        self._out(json.dumps(text, ensure_ascii=False)[1:-1])


class Gemma(AnswerFormat):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``: Gemma 4."""

    name = "gemma"
    special = True
    openers: tuple[str, ...] = ("<|tool_call>",)
    quote = '<|"|>'
    close = "<tool_call|>"
    markers: tuple[str, ...] = (*openers, close, quote)

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call."""
        source = answer.source
        yield from source.run(SPACE)
        if not (yield from source.literal("call:")):
            raise Malformed
        name = yield from source.run(_NAME)
        answer.known(name)
        yield from source.run(SPACE)
        if not (yield from source.literal("{")):
            if not source.ended:
                raise Malformed
            answer.start(name)
            return
        answer.start(name)
        if (yield from _Arguments(answer, self.quote).read()):
            yield from end_marker(answer, self.close)

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call."""
        from .gemma_grammar import arguments_rule

        calls = [f"{lark.text(f'{self.openers[0]}call:{tool.name}')} {arguments_rule(lark, tool, self.quote)} "
                 f"{lark.text(self.close)}" for tool in tools]
        return lark.repeated(lark.any_of(calls), "", parallel)


class FunctionGemma(Gemma):
    """``<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>``: FunctionGemma."""

    name = "function_gemma"
    openers = ("<start_function_call>",)
    quote = "<escape>"
    close = "<end_function_call>"
    markers = (*openers, close, quote)
