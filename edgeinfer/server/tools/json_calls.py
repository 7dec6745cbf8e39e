"""Calls as JSON objects with a name and arguments: Hermes and Qwen, and Llama 3."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .answer import Answer
from .answer_format import AnswerFormat, end_marker
from .json_text import json_string, json_value, parsed
from .source import SPACE, Malformed, Steps

if TYPE_CHECKING:
    from .events import Tool
    from .lark import Lark

_ARGUMENTS = ("arguments", "parameters")


def json_call(answer: Answer, marked: bool = True) -> Steps[None]:
    """Read an object with ``name`` and ``arguments`` (or ``parameters``), in any order, and make a call of it.

    Parameters
    ----------
    answer : Answer
    marked : whether a marker says that this is a call: then the name is enough for one that the end of the text cuts

    Raises
    ------
    Malformed
        It is no such object, or its name is not among the tools.
    """
    call = _JsonCall(answer)
    try:
        yield from call.read()
    except Malformed:
        if call.started or not (marked and call.name and answer.source.ended):
            raise
        answer.start(call.name)


class _JsonCall:
    """A call while it is read."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self.name, self.started = "", False
        self._early = ""

    def read(self) -> Steps[None]:
        """Read the object; it begins the call when its arguments begin and the name is known."""
        source = self._answer.source
        yield from sign(self._answer, "{")
        while True:
            key = yield from json_string(source)
            yield from sign(self._answer, ":")
            if key == "name" and not self.name:
                name = yield from json_string(source)
                self._answer.known(name)
                self.name = name
            elif key in _ARGUMENTS and not self._early and not self.started:
                yield from self._arguments()
            else:
                yield from json_value(source, lambda _: None)
            yield from source.run(SPACE)
            if not (yield from source.literal(",")):
                break
            yield from source.run(SPACE)
        if not (yield from source.literal("}")):
            raise Malformed
        if not self.started:
            self._answer.start(self.name)
            self._answer.arguments(self._early or "{}")

    def _arguments(self) -> Steps[None]:
        source = self._answer.source
        char = yield from source.character()
        if char == "{" and self.name:
            self._answer.start(self.name)
            self.started = True
            yield from json_value(source, self._answer.arguments)
        elif char == '"':  # JSON in a string, as OpenAI's API has it
            self._early = object_in((yield from json_string(source)))
        elif char in ("{", "n"):
            parts: list[str] = []
            yield from json_value(source, parts.append)
            self._early = "{}" if char == "n" else "".join(parts)
        else:
            raise Malformed


def sign(answer: Answer, char: str) -> Steps[None]:
    """Read a sign of JSON's structure and the space around it; raises `Malformed` if another character is there."""
    yield from answer.source.run(SPACE)
    if not (yield from answer.source.literal(char)):
        raise Malformed
    yield from answer.source.run(SPACE)


def object_in(text: str) -> str:
    """Return the JSON of the object that a string contains; raises `Malformed` if it contains anything else."""
    try:
        value = parsed(text or "{}")
        if isinstance(value, dict):
            return json.dumps(value)
    except (ValueError, RecursionError):
        pass
    raise Malformed


class Hermes(AnswerFormat):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, once per call: Hermes, Qwen 2.5 and 3, and others."""

    name = "hermes"
    special = True
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call."""
        yield from json_call(answer)
        yield from end_marker(answer, "</tool_call>")

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call."""
        calls = [lark.text('<tool_call>\n{"name": ' + json.dumps(tool.name) + ', "arguments": ') + " "
                 + lark.json(tool) + " " + lark.text("}\n</tool_call>") for tool in tools]
        return lark.repeated(lark.any_of(calls), lark.text("\n"), parallel)


class Llama(AnswerFormat):
    """``{"name": ..., "parameters": ...}`` at the beginning of an answer, or after ``<|python_tag|>``: Llama 3."""

    name = "llama"
    special = True
    openers = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    bare = True

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template is Llama 3's with tools."""
        return super().recognises(template) or ("<|start_header_id|>" in template and '"parameters"' in template)

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call."""
        yield from json_call(answer, marked=bool(opener))

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call: one, as these models were trained."""
        return lark.any_of([lark.text('{"name": ' + json.dumps(tool.name) + ', "parameters": ') + " "
                            + lark.json(tool) + " " + lark.text("}") for tool in tools])
