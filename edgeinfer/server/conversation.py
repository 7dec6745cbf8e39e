"""An answer to a conversation, whichever API asked for it: reasoning, text and tool calls as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.text_form import TextForm
from ..engine import TokenLogprob
from .answers import Answer
from .errors import ApiError
from .messages import template_tools, with_text_arguments
from .models import SHORT, in_thread
from .sampling import fitted
from .tools import AnswerParser, CallArguments, CallStart, Content, Event, Reasoning, Tool, forced

if TYPE_CHECKING:
    from ..engine import Completion, Request
    from .http import Call
    from .models import Served

TAIL_TOKENS = 64
"""Tokens at the end of a prompt that are searched for the beginning of reasoning."""


@dataclass
class Asked:
    """A conversation and how it is to be answered."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    """Options of the request but `max_tokens`."""
    most: int | None = None
    """Tokens of the answer; None is all that there is room for."""
    form: TextForm | None = None
    tools: list[Tool] = field(default_factory=list)
    choice: str | Tool = "none"
    parallel: bool = True
    """True if an answer may have several calls."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the chat template."""

    @property
    def short(self) -> bool:
        """True if it is prepared in less time than another thread takes to wake up."""
        values = [value for one in self.messages for value in one.values()]
        return not self.tools and self.form is None and all(isinstance(value, str) for value in values) \
            and sum(map(len, values)) <= SHORT


class Piece(NamedTuple):
    """New parts of an answer."""

    number: int
    """Index of the sample."""
    parts: list[Event]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    """Empty while it continues; stop, length or tool_calls."""


class Conversation:
    """The answers to a conversation.

    Attributes
    ----------
    answer : Answer
    """

    def __init__(self, answer: Answer, parsers: list[AnswerParser]):
        self.answer, self._parsers = answer, parsers
        self._called = [False] * len(parsers)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Iterate over new parts of the answers; a long silence gives nothing."""
        async for found in self.answer.deltas():
            pieces = [self._piece(one.number, one.text, one.logprobs, one.finish_reason) for one in found]
            pieces = [one for one in pieces if one.parts or one.logprobs or one.finish_reason]
            if pieces or not found:
                yield pieces

    async def whole(self) -> list[Piece]:
        """Return each answer whole."""
        done = await self.answer.whole()
        return [self._piece(one.index, one.text, one.logprobs or (), one.finish_reason or "cancelled")
                for one in done.choices]

    def _piece(self, index: int, text: str, logprobs: tuple[TokenLogprob, ...], reason: str) -> Piece:
        parser = self._parsers[index]
        parts: list[Event] = list(parser.push(text)) if text else []
        if reason:
            parts += parser.flush()
        self._called[index] |= any(isinstance(one, CallStart) for one in parts)
        return Piece(index, _joined(parts), logprobs, finish_reason(reason, self._called[index]))


def finish_reason(reason: str, called: bool = False) -> str:
    """Return OpenAI's word for how an answer ended.

    One whose time was over, or which the server ended, was cut off like one that reached its length.
    """
    if reason in ("length", "cancelled"):
        return "length"
    return ("tool_calls" if called else "stop") if reason else ""


def _joined(parts: list[Event]) -> list[Event]:
    """Return parts of which neighbours of one kind are one."""
    made: list[Event] = []
    for one in parts:
        last = made[-1] if made else None
        if isinstance(one, (Content, Reasoning)) and type(last) is type(one):
            made[-1] = type(one)(last.text + one.text)
        elif isinstance(one, CallArguments) and isinstance(last, CallArguments) and last.index == one.index:
            made[-1] = CallArguments(one.index, last.text + one.text)
        else:
            made.append(one)
    return made


async def begin(call: Call, served: Served, asked: Asked, held: AsyncExitStack) -> Conversation:
    """Prepare the answer to a conversation and hand it to the engine; `held` ends it.

    Raises
    ------
    ApiError, EdgeInferError
        The model cannot answer such a conversation, or the request is refused.
    """
    llm, found = served.model, served.format
    if llm.chat_template is None or found is None:
        raise ApiError(400, f"The model {served.name!r} has no chat template; use /v1/completions.", param="model",
                       code="no_chat_template")
    tools = [] if asked.choice == "none" else asked.tools
    called = asked.choice.name if isinstance(asked.choice, Tool) else asked.choice
    if called not in ("none", "auto"):
        call.form_field = "tools"
    if called not in ("none", "auto") and asked.form:
        raise ApiError(400, "A forced tool call has the form of its arguments; leave response_format out.",
                       param="response_format")

    def prepare() -> tuple[Request[Completion], str]:
        shown = with_text_arguments(asked.messages) if found.text_arguments else asked.messages
        ids = llm.chat_ids(shown, template_tools(tools), **asked.template)
        end = llm.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special=False)
        form = asked.form
        if called not in ("none", "auto"):
            form = forced(found, tools, called, asked.parallel, end, served.special)
        options = fitted({**asked.options, "reuse": True}, served, len(ids), asked.most)
        keeps = found.special and (found.reasons or bool(tools))
        return llm.request(ids, options | ({"response_format": form} if form else {}), skip_special=not keeps,
                           salt=call.salt), end

    request, end = await in_thread(prepare, asked.short)
    call.note["model"] = served.name
    if call.server.config.log_prompts:
        call.note["messages"] = asked.messages
    answer = Answer(request, call)
    parsers = [AnswerParser(found, tools, end) for _ in range(asked.options.get("n", 1))]
    held.callback(answer.close)
    answer.start()
    return Conversation(answer, parsers)
