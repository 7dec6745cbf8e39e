"""An answer while it is read: the interface between a format's reader and its source and sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from .events import CallArguments, CallStart, Content, Event, Reasoning, Tool
from .source import Malformed, Source, Steps


class Answer:
    """The text of one answer and the events that are made of it.

    Space between content and a call, around reasoning and between calls belongs to the markup and is dropped.

    Parameters
    ----------
    tools : the functions that may be called
    new_id : makes the id of a call

    Attributes
    ----------
    source : Source
    tools : Tool by name
    calls : number of calls so far
    """

    def __init__(self, tools: Iterable[Tool], new_id: Callable[[], str]):
        self.source = Source()
        self.tools = {tool.name: tool for tool in tools}
        self.calls = 0
        self._new_id = new_id
        self._parts: list[tuple[Any, list[str]]] = []
        self._reasoning, self._content = _Text(self, Reasoning), _Text(self, Content)

    def reasoning(self, text: str) -> None:
        """Add text that the model writes for itself."""
        self._reasoning.write(text)

    def content(self, text: str) -> None:
        """Add text for the reader."""
        self._content.write(text)

    def begin_reasoning(self) -> None:
        """Begin reasoning: space before it and at its beginning is dropped."""
        self._content.drop()
        self._reasoning.skip_space()

    def end_reasoning(self) -> None:
        """End reasoning: space at its end and before the next part is dropped."""
        self._reasoning.drop()
        self._content.skip_space()

    def known(self, name: str) -> Tool:
        """Return the tool of this name; raises `Malformed` for an unknown name."""
        if name not in self.tools:
            raise Malformed
        return self.tools[name]

    def start(self, name: str) -> Tool:
        """Begin a call; from here on its text is no longer returned. Raises `Malformed` for an unknown name."""
        tool = self.known(name)
        self.source.kept()
        self._content.drop()
        self._parts.append((CallStart(self.calls, self._new_id(), name), []))
        self.calls += 1
        return tool

    def arguments(self, text: str) -> None:
        """Add a piece of the arguments of the call that began last."""
        self._emit(CallArguments, text)

    def attempt(self, opener: str, steps: Steps[None]) -> Steps[bool]:
        """Read a possible call and return whether it is one; otherwise it becomes content, `opener` included."""
        before = self.calls
        self.source.keep(opener)
        with suppress(Malformed):  # the rest is read as content
            yield from steps
        if given_back := self.source.kept():
            self.content(given_back)
        return self.calls > before

    def finish(self) -> None:
        """Add the space that ends the text, unless it follows a call."""
        self._reasoning.release()
        if not self.calls:
            self._content.release()

    def events(self) -> list[Event]:
        """Return the events since the last time."""
        made = [kind if not parts else kind("".join(parts)) if isinstance(kind, type)
                else CallArguments(kind.index, "".join(parts)) for kind, parts in self._parts]
        self._parts.clear()
        return made

    def _emit(self, kind: Any, text: str) -> None:
        if not text:
            return
        if kind is CallArguments:
            kind = CallArguments(self.calls - 1, "")
        if not self._parts or self._parts[-1][0] != kind:
            self._parts.append((kind, []))
        self._parts[-1][1].append(text)


class _Text:
    """Text of one kind, whose space at the end waits for the next part."""

    def __init__(self, answer: Answer, kind: type):
        self._answer, self._kind = answer, kind
        self._space: list[str] = []
        self._skip = False

    def write(self, text: str) -> None:
        if self._skip:
            text = text.lstrip()
            self._skip = not text
        body = text.rstrip()
        if body:
            self.release()
            self._answer._emit(self._kind, body)
        if len(body) < len(text):
            self._space.append(text[len(body):])

    def release(self) -> None:
        self._answer._emit(self._kind, "".join(self._space))
        self._space.clear()

    def drop(self) -> None:
        self._space.clear()

    def skip_space(self) -> None:
        self._skip = True
