"""The parser of one answer."""

from __future__ import annotations

from collections.abc import Iterable

from .answer import Answer
from .answer_format import AnswerFormat
from .events import Event, Tool


class AnswerParser:
    """Splits the text of an answer, as it is generated, into reasoning, content and tool calls.

    Text may be cut anywhere between two pushes. A call begins when its name is known and its arguments follow, and its
    arguments are passed on as they come. Text that only looks like a call, or calls no tool of the request, is content.
    If arguments that have begun turn out to be malformed, their valid part stays and the rest is content.

    Parameters
    ----------
    format : AnswerFormat
    tools : the functions that may be called; without any, only reasoning is split off
    prompt_text : the prompt, which may end inside reasoning
    """

    def __init__(self, format: AnswerFormat, tools: Iterable[Tool], prompt_text: str):
        self._answer = Answer(tools, format.new_id)
        self._steps = format.read(self._answer, prompt_text)
        next(self._steps, None)

    def push(self, text: str) -> list[Event]:
        """Read the next piece of the text and return its deltas."""
        self._answer.source.feed(text)
        next(self._steps, None)
        return self._answer.events()

    def flush(self) -> list[Event]:
        """End the text and return the rest that was held back; nothing may be pushed afterwards."""
        self._answer.source.ended = True
        for _ in self._steps:
            pass
        self._answer.finish()
        return self._answer.events()
