"""Reasoning and tool calls: read from the text of an answer, and forced by a grammar."""

from .answer_format import AnswerFormat
from .events import CallArguments, CallStart, Content, Event, Reasoning, Tool
from .forced import forced
from .formats import format_of
from .parser import AnswerParser

__all__ = ["AnswerFormat", "AnswerParser", "CallArguments", "CallStart", "Content", "Event", "Reasoning", "Tool",
           "forced", "format_of"]
