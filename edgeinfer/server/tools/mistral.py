"""Mistral's calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .answer import Answer
from .answer_format import AnswerFormat, random_text
from .json_calls import json_call, object_in
from .json_text import json_string, json_value
from .source import SPACE, Malformed, Steps

if TYPE_CHECKING:
    from .events import Tool
    from .lark import Lark

_NAME, _ID = re.compile(r"[^\s\[{]*"), re.compile(r"[A-Za-z0-9]*")


class Mistral(AnswerFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]`` and the newer ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    special = True
    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, template: str = ""):
        super().__init__(template)
        self._newer, self._with_id = "[ARGS]" in template, "[CALL_ID]" in template

    def new_id(self) -> str:
        """Return an id of nine letters and digits: Mistral's templates refuse others."""
        return random_text(9)

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call, or a list of calls."""
        source = answer.source
        yield from source.run(SPACE)
        if (yield from source.literal("[")):
            yield from self._list(answer)
            return
        name = yield from source.run(_NAME)
        answer.known(name)
        if (yield from source.literal("[CALL_ID]")):
            yield from source.run(_ID)
        marked = yield from source.literal("[ARGS]")
        yield from source.run(SPACE)
        char = yield from source.character()
        if char == '"':  # as templates render arguments that are text
            text = object_in((yield from json_string(source)))
            answer.start(name)
            answer.arguments(text)
            return
        if char != "{" and not (marked and source.ended):
            raise Malformed
        answer.start(name)
        yield from json_value(source, answer.arguments)

    def _list(self, answer: Answer) -> Steps[None]:
        source = answer.source
        yield from json_call(answer)
        while True:
            space = yield from source.run(SPACE)
            sign = yield from source.literal(",", "]")
            if sign != ",":
                answer.content("" if sign else space)
                return
            if not (yield from answer.attempt(space + sign, json_call(answer))):
                return

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call."""
        if not self._newer:
            key, quote, close = lark.text(', "id": "'), lark.text('"'), lark.text("}")
            end = f"({key} /[a-zA-Z0-9]{{9}}/ {quote})? {close}"
            calls = [lark.text('{"name": ' + json.dumps(tool.name) + ', "arguments": ') + f" {lark.json(tool)} {end}"
                     for tool in tools]
            listed = lark.repeated(lark.any_of(calls), lark.text(", "), parallel)
            return f"{lark.text('[TOOL_CALLS][')} {listed} {lark.text(']')}"
        middle = f"({lark.text('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? " if self._with_id else ""
        calls = [f"{lark.text('[TOOL_CALLS]' + tool.name)} {middle}{lark.text('[ARGS]')} {lark.json(tool)}"
                 for tool in tools]
        return lark.repeated(lark.any_of(calls), "", parallel)
