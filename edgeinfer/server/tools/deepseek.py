"""DeepSeek's calls."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .answer import Answer
from .answer_format import AnswerFormat, end_marker
from .json_text import json_value
from .source import SPACE, Malformed, Steps

if TYPE_CHECKING:
    from .events import Tool
    from .lark import Lark

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD, _LINE = re.compile(r"[^<\n]*"), re.compile(r"[^\n`{]*")


class DeepSeek(AnswerFormat):
    """Calls between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.

    V3 and R1 write the type, the separator, the name and the arguments in a code block; V3.1 the name, the separator
    and the arguments.
    """

    name = "deepseek"
    special = True
    text_arguments = True
    openers = (_CALLS, _CALL)
    markers = (_CALLS, _END_CALLS, _CALL, _SEPARATOR, _END_CALL)

    def __init__(self, template: str = ""):
        super().__init__(template)
        self._fenced = "```json" in template

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call."""
        source = answer.source
        if opener == _CALLS:
            yield from source.run(SPACE)
            yield from _read(answer, _CALL)
        name = (yield from source.run(_HEAD)).strip()
        yield from _read(answer, _SEPARATOR)
        fence = ""
        yield from source.run(SPACE)
        if (yield from source.standing("```", "{")) != "{":
            line = (yield from source.run(_LINE)).strip()
            name = line or name
            answer.known(name)
            yield from source.run(SPACE)
            fence = yield from source.literal("```json", "```")
            yield from source.run(SPACE)
        if (yield from source.character()) != "{" and not source.ended:
            raise Malformed
        answer.start(name)
        yield from json_value(source, answer.arguments)
        if fence:
            yield from end_marker(answer, "```")
        if (yield from end_marker(answer, _END_CALL)):
            yield from end_marker(answer, _END_CALLS)

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call."""
        if self._fenced:
            fence, end = lark.text("\n```json\n"), lark.text(f"\n```{_END_CALL}")
            calls = [f"{lark.text(f'{_CALL}function{_SEPARATOR}{tool.name}')} {fence} {lark.json(tool)} {end}"
                     for tool in tools]
        else:
            calls = [f"{lark.text(f'{_CALL}{tool.name}{_SEPARATOR}')} {lark.json(tool)} {lark.text(_END_CALL)}"
                     for tool in tools]
        listed = lark.repeated(lark.any_of(calls), lark.text("\n") if self._fenced else "", parallel)
        return f"{lark.text(_CALLS)} {listed} {lark.text(_END_CALLS)}"


def _read(answer: Answer, marker: str) -> Steps[None]:
    if not (yield from answer.source.literal(marker)):
        raise Malformed
