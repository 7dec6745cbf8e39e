"""The parts of an answer: reasoning, content and tool calls, and the tools that may be called."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Union

from edgeinfer.base.dataclass import dataclass


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, as an entry of OpenAI's ``tools`` describes it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments; an empty one means that the function takes none."""
    strict: bool = False
    """True if a schema with keywords that no grammar can express is refused instead of partly ignored."""


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call."""

    index: int
    """Number of the call in this answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments; all pieces of one call are the text of one JSON object."""

    index: int
    text: str


Event = Union[Reasoning, Content, CallStart, CallArguments]  # noqa: UP007 - Python 3.10 evaluates it
