"""Input of chat messages: a multi-line editor on terminals that can show one, else plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

QUOTES = '"""'
EDITOR_BYTES = 14_000_000
"""Memory that prompt_toolkit takes, as measured on Linux."""
MORE = "... "


def unfinished(text: str) -> bool:
    """Return whether a message begins with three quotes and does not end with three others."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def message(text: str) -> str:
    """Return a message without white space around it and without the quotes that allow several lines."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip()
    return text


def draws() -> bool:
    """Return whether the terminal can show an editor."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown") and sys.platform != "win32"
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb


def plain_reader() -> Callable[[], str]:
    """Return a function that reads a message line by line; it raises `EOFError` and `KeyboardInterrupt`."""
    with contextlib.suppress(ImportError):  # line editing, where Python has it
        import readline  # noqa: F401

    def read() -> str:
        text = input("> ")
        while unfinished(text):
            text += "\n" + input(MORE)
        return text

    return read


def editing_reader() -> Callable[[], str]:
    """Return a function that reads a message in an editor, where pasted lines are one message and Alt-Enter begins a
    line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def accept(event: KeyPressEvent) -> None:
        if unfinished(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output()
    output.enable_cpr = False  # type: ignore[attr-defined]  # a late answer of the terminal would be taken as typed
    session: PromptSession[str] = PromptSession(
        "> ", multiline=True, key_bindings=keys, prompt_continuation=MORE, reserve_space_for_menu=0, output=output)
    return session.prompt
