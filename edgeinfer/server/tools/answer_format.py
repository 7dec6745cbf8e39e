"""The interface of a format: how a family of models writes reasoning and tool calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgeinfer.base.dataclass import dataclass

from .answer import Answer
from .source import SPACE, Steps

if TYPE_CHECKING:
    from .events import Tool
    from .lark import Lark

_ALPHABET = (string.ascii_letters + string.digits).encode()
_LETTERS = bytes(_ALPHABET[i % len(_ALPHABET)] for i in range(256))
"""Letter or digit of a random byte; an answer may have thousands of calls, so an id is one call of the system."""
_SEPARATOR = re.compile(r"[\s;]*")


@dataclass(frozen=True)
class Thought:
    """The markers around reasoning."""

    open: str
    close: str
    anywhere: bool = False
    """True if reasoning may follow content; otherwise the marker counts only where the answer begins."""


THOUGHTS = (Thought("<|channel>thought", "<channel|>", anywhere=True), Thought("[THINK]", "[/THINK]", anywhere=True),
            Thought("<think>", "</think>"))
"""The markers of Gemma 4, Mistral, and all others."""


class AnswerFormat:
    """A format; this one has no calls, which the fallback of `format_of` adds.

    Attributes
    ----------
    name : str
    special : bool
        Whether markers may be special tokens, so that the text must be decoded with special tokens kept.
    openers : tuple of str
        Markers that begin a call.
    markers : tuple of str
        All markers of a forced call; those among the model's special tokens must be generated as such.
    bare : bool
        Whether a call can also begin without a marker, as JSON where the answer begins.
    always : bool
        Whether every answer has markers, also without tools.
    thought : Thought or None
        The markers of reasoning.
    text_arguments : bool
        Whether the chat template takes the arguments of earlier calls as text, as OpenAI's API has them; others take
        objects.
    """

    name = "plain"
    special = False
    openers: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    bare = False
    always = False
    text_arguments = False

    def __init__(self, template: str = ""):
        self.thought = next((one for one in THOUGHTS if one.close in template), None)
        self.special = self.special or bool(self.thought and self.thought.anywhere)

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template is of this format."""
        return any(opener in template for opener in cls.openers)

    @property
    def reasons(self) -> bool:
        """True if answers may have reasoning."""
        return self.always or self.thought is not None

    def thinks(self, prompt_text: str) -> bool:
        """Return whether the answer to a prompt begins inside reasoning."""
        return bool(self.thought and prompt_text.rstrip().endswith(self.thought.open))

    def new_id(self) -> str:
        """Return an id for a call, as OpenAI's."""
        return "call_" + random_text(24)

    def call(self, answer: Answer, opener: str) -> Steps[None]:
        """Read a call whose opener has been read; raises `Malformed` for other text."""
        raise NotImplementedError

    def grammar(self, lark: Lark, tools: Iterable[Tool], parallel: bool) -> str:
        """Return the rule of one forced call, or of several; it adds the rules that it needs to `lark`."""
        raise NotImplementedError

    def read(self, answer: Answer, prompt_text: str) -> Steps[None]:
        """Read an answer to its end."""
        source = answer.source
        if self.thought:
            yield from self._begin(answer, self.thought, self.thinks(prompt_text))
        openers = self.openers if answer.tools else ()
        if self.bare and answer.tools:
            yield from self._bare(answer, SPACE)
        thought = self.thought if self.thought and self.thought.anywhere else None
        while opener := (yield from source.until(openers + ((thought.open,) if thought else ()), answer.content)):
            if thought and opener == thought.open:
                yield from _think(answer, thought)
            elif (yield from answer.attempt(opener, self.call(answer, opener))) and self.bare:
                yield from self._bare(answer, _SEPARATOR)

    def _begin(self, answer: Answer, thought: Thought, inside: bool) -> Steps[None]:
        source = answer.source
        if not inside:
            source.keep("")
            yield from source.run(SPACE)
            inside = bool((yield from source.literal(thought.open)))
            before = source.kept()
            if not inside:
                answer.content(before)
        if inside:
            yield from _think(answer, thought)

    def _bare(self, answer: Answer, separator: re.Pattern[str]) -> Steps[None]:
        """Read calls without a marker."""
        while True:
            before = yield from answer.source.run(separator)
            if (yield from answer.source.character()) != "{":
                answer.content(before)
                return
            if not (yield from answer.attempt(before, self.call(answer, ""))):
                return
            separator = _SEPARATOR


def _think(answer: Answer, thought: Thought) -> Steps[None]:
    answer.begin_reasoning()
    if (yield from answer.source.until((thought.close,), answer.reasoning)):
        answer.end_reasoning()


def end_marker(answer: Answer, *markers: str) -> Steps[str]:
    """Read the space and marker after a call, if they are there; other space is content."""
    space = yield from answer.source.run(SPACE)
    found = yield from answer.source.literal(*markers)
    if not found:
        answer.content(space)
    return found


def random_text(length: int) -> str:
    """Return letters and digits that cannot be guessed."""
    return secrets.token_bytes(length).translate(_LETTERS).decode()
