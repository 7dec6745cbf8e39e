"""Grammars that make the model write a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgeinfer.base.text_form import GRAMMAR, TextForm
from edgeinfer.errors import RequestError

from .answer_format import AnswerFormat
from .events import Tool
from .lark import Lark

REQUIRED = "required"


def forced(format: AnswerFormat, tools: Sequence[Tool], choice: str, parallel: bool, prompt_text: str = "",
           special: Mapping[str, int] | None = None) -> TextForm:
    """Return the form of an answer that is a call in the model's own format, with arguments that satisfy the schema.

    Parameters
    ----------
    format : AnswerFormat
    tools : the functions of the request
    choice : ``required`` for a call of any of them, or the name of one
    parallel : whether several calls may follow each other, in formats that have this
    prompt_text : the prompt; if it opens reasoning, or leaves it open whether there is any, reasoning may come first
    special : ids of the model's special tokens by their text: markers among them are generated as such

    Raises
    ------
    RequestError
        There is no tool of this name, or no tool at all.
    UsageError
        The schemas are too long for a grammar.
    """
    named = [tool for tool in tools if choice in (REQUIRED, tool.name)]
    if not named:
        raise RequestError("tool_choice is 'required', but tools is empty; add a tool." if choice == REQUIRED else
                           f"tool_choice names the function {choice!r:.80}, which is not among the tools.")
    thought = format.thought
    markers = (*format.markers, *((thought.open, thought.close) if thought else ()))
    lark = Lark({marker: special[marker] for marker in markers if special and marker in special})
    call = format.grammar(lark, named, parallel)
    if thought and prompt_text and not prompt_text.rstrip().endswith(thought.close):
        rest = rf"{lark.up_to(thought.close)} /\n{{0,2}}/"
        call = f"{rest} {call}" if format.thinks(prompt_text) else f"({lark.text(thought.open)} {rest})? {call}"
    return TextForm(GRAMMAR, lark.source(call))
