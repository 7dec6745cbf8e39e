"""Calls whose arguments are marked up one by one: Qwen-Coder's and GLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .answer import Answer
from .answer_format import AnswerFormat, end_marker
from .events import Tool
from .json_calls import json_call
from .schema import STRING, as_json, property_of, types_of
from .source import SPACE, Malformed, Sink, Steps

if TYPE_CHECKING:
    from .lark import Lark

_QWEN_NAME, _GLM_NAME = re.compile(r"[^>\n<]*"), re.compile(r"[^\n<]*")


class _Arguments:
    """The arguments of a call as JSON, made of values that arrive one by one."""

    def __init__(self, answer: Answer, tool: Tool):
        self._answer, self._tool = answer, tool
        self._any = False

    def key(self, end: str) -> Steps[str]:
        """Read a name up to its end marker."""
        self._answer.arguments(', "' if self._any else '{"')
        self._any = True
        parts: list[str] = []
        found = yield from self._answer.source.until((end,), lambda text: self._escaped(text, parts))
        if found:
            self._answer.arguments('": ')
        return "".join(parts)

    def value(self, key: str, ends: tuple[str, ...], followers: tuple[str, ...]) -> Steps[None]:
        """Read a value up to an end marker that is followed by another marker; other end markers are part of it."""
        source, types = self._answer.source, types_of(property_of(self._tool, key), self._tool.parameters)
        parts: list[str] = []
        sink: Sink = (lambda text: self._escaped(text, None)) if types == STRING else parts.append
        if types == STRING:
            self._answer.arguments('"')
        while True:
            end = yield from source.until(ends, sink)
            if not end:
                self._answer.arguments("".join(parts))
                return
            space = yield from source.run(SPACE)
            if (yield from source.standing(*followers)) or source.ended:
                break
            sink(end + space)
        self._answer.arguments('"' if types == STRING else as_json("".join(parts), types))

    def close(self) -> None:
        """End the object, unless the text was cut before."""
        self._answer.arguments("}" if self._any else "{}")

    def _escaped(self, text: str, parts: list[str] | None) -> None:
        if parts is not None:
            parts.append(text)
        self._answer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class QwenCoder(AnswerFormat):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder."""

    name = "qwen_coder"
    special = True
    openers = ("<tool_call>", "<function=")
    markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template is of this format."""
        return "<function=" in template and "<parameter=" in template

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call; models leave out ``<tool_call>`` at times, or write JSON into it."""
        source = answer.source
        if opener == "<tool_call>":
            yield from source.run(SPACE)
            if (yield from source.standing("{", "<function=")) == "{":
                yield from json_call(answer)
                yield from end_marker(answer, "</tool_call>")
                return
            if not (yield from source.literal("<function=")):
                raise Malformed
        name = yield from source.run(_QWEN_NAME)
        if not (yield from source.literal(">")):
            raise Malformed
        yield from self._body(answer, answer.start(name))
        if opener == "<tool_call>":
            yield from end_marker(answer, "</tool_call>")

    def _body(self, answer: Answer, tool: Tool) -> Steps[None]:
        arguments = _Arguments(answer, tool)
        while True:
            found = yield from end_marker(answer, "<parameter=", "</function>")
            if found != "<parameter=":
                break
            key = yield from arguments.key(">")
            yield from answer.source.literal("\n")
            yield from arguments.value(key, ("\n</parameter>", "</parameter>"), ("<parameter=", "</function>"))
        if found or not answer.source.ended:
            arguments.close()

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call."""
        calls = []
        for tool in tools:
            members = lark.members(tool, lambda key: f"<parameter={key}>\n", "\n</parameter>", "\n")
            begin, end = lark.text(f"<tool_call>\n<function={tool.name}>\n"), lark.text("</function>\n</tool_call>")
            calls.append(f"{begin} {members} {end}")
        return lark.repeated(lark.any_of(calls), lark.text("\n"), parallel)


class Glm(AnswerFormat):
    """``<tool_call>name``, ``<arg_key>key</arg_key>``, ``<arg_value>value</arg_value>``, ``</tool_call>``: GLM 4.5."""

    name = "glm"
    special = True
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def __init__(self, template: str = ""):
        super().__init__(template)
        self._between = "\n" if "</arg_key>\n" in template else ""

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template is of this format."""
        return "<arg_key>" in template

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call."""
        source = answer.source
        yield from source.run(SPACE)
        if (yield from source.character()) == "{":
            yield from json_call(answer)
            yield from end_marker(answer, "</tool_call>")
            return
        name = (yield from source.run(_GLM_NAME)).strip()
        arguments = _Arguments(answer, answer.start(name))
        while True:
            found = yield from end_marker(answer, "<arg_key>", "</tool_call>")
            if found != "<arg_key>":
                break
            key = yield from arguments.key("</arg_key>")
            if not (yield from end_marker(answer, "<arg_value>")):
                answer.arguments("" if source.ended else "null")
                break
            yield from arguments.value(key, ("</arg_value>",), ("<arg_key>", "</tool_call>"))
        if found or not source.ended:
            arguments.close()

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call."""
        between, calls = self._between, []
        for tool in tools:
            members = lark.members(tool, lambda key: f"<arg_key>{key}</arg_key>{between}<arg_value>", "</arg_value>",
                                   between)
            calls.append(f"{lark.text(f'<tool_call>{tool.name}{between}')} {members} {lark.text('</tool_call>')}")
        return lark.repeated(lark.any_of(calls), lark.text("\n"), parallel)
