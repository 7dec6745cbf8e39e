"""The harmony format of gpt-oss: messages with channels (https://github.com/openai/harmony)."""

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

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL_NAME, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


class Harmony(AnswerFormat):
    """Messages ``<|channel|>name<|message|>text<|end|>``; calls are addressed ``to=functions.name``.

    The channel ``analysis`` is reasoning, ``final`` and the preambles of ``commentary`` are content.
    """

    name = "harmony"
    special = always = True
    openers = (_START, _CHANNEL)
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def __init__(self, template: str = ""):
        super().__init__(template)
        self.thought = None

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template is of this format."""
        return _CHANNEL in template and _MESSAGE in template

    def thinks(self, prompt_text: str) -> bool:
        """Return whether the answer to a prompt begins inside reasoning."""
        return prompt_text.endswith(f"{_CHANNEL}analysis{_MESSAGE}")

    def read(self, answer: Answer, prompt_text: str) -> Steps[None]:
        """Read an answer to its end."""
        source = answer.source
        _, mark, begun = prompt_text.rpartition(_START)
        begun = begun if mark else ""
        if begun.endswith(_MESSAGE):
            yield from self._text(answer, begun)
        elif (yield from source.standing(" to=", _MESSAGE, _CONSTRAIN)):
            yield from answer.attempt("", self._message(answer, begun))
        while opener := (yield from source.until(self.openers, answer.content)):
            yield from answer.attempt(opener, self._message(answer, opener))

    def _message(self, answer: Answer, header: str) -> Steps[None]:
        """Read a message whose header has begun; raises `Malformed` for an invalid one or an unknown call."""
        source, parts = answer.source, [header]
        if (yield from source.until((_MESSAGE, *_ENDS), parts.append)) != _MESSAGE:
            raise Malformed
        header = "".join(parts)
        if recipient := _RECIPIENT.search(header):
            yield from self._call(answer, recipient[1])
        else:
            source.kept()
            yield from self._text(answer, header)

    def _call(self, answer: Answer, recipient: str) -> Steps[None]:
        source, name = answer.source, recipient.removeprefix("functions.")
        answer.known(name)
        yield from source.run(SPACE)
        if (yield from source.character()) != "{" and not source.ended:
            raise Malformed
        answer.start(name)
        if (yield from json_value(source, answer.arguments)):
            yield from end_marker(answer, *_ENDS)

    def _text(self, answer: Answer, header: str) -> Steps[None]:
        channel = _CHANNEL_NAME.search(header)
        thinks = bool(channel and channel[1] == "analysis")
        sink = answer.reasoning if thinks else answer.content
        end = yield from answer.source.until((*_ENDS, *self.openers), sink)
        if thinks and end:
            answer.end_reasoning()
        if end in self.openers:
            answer.source.back(len(end))

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of a forced call, which may have an analysis before it."""
        thoughts = lark.rule(f"{lark.text(f'{_CHANNEL}analysis{_MESSAGE}')} {lark.up_to('<|end|>')} "
                             f"{lark.text(f'{_START}assistant')}")
        calls = [f"{lark.text(f'{_CHANNEL}commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}')} "
                 f"{lark.json(tool)}" for tool in tools]
        return f"{thoughts}? {lark.any_of(calls)}"
