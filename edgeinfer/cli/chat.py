"""Chat on a terminal: a conversation with history, and commands that begin with a slash."""

from __future__ import annotations

import contextlib
import difflib
import sys
from typing import TYPE_CHECKING, Any

from ..errors import CancelledError, EdgeInferError, UsageError
from ..process import peak_rss_bytes
from .output import figures, say
from .progress import ProgressLine
from .run import cancelling, reading

if TYPE_CHECKING:
    from ..engine import Completion, Stream
    from ..llm import LLM

COMMANDS = {
    "/help": "list these commands",
    "/clear": "forget the conversation",
    "/stats": "figures of the last answer, and memory",
    "/exit": "leave, as Ctrl-D does",
}


class Conversation:
    """The turns so far: messages where the model has a chat template, else one growing text.

    Parameters
    ----------
    llm : answers
    system : first message of every conversation
    raw : continue text even where there is a template
    options : of each request
    """

    def __init__(self, llm: LLM, system: str | None, raw: bool, options: dict[str, Any]):
        self._llm = llm
        self._options = {**options, "reuse": True}
        self._template = llm.chat_template is not None and not raw
        if system is not None and not self._template:
            raise UsageError("--system cannot be used without a chat template; say it in your first message.")
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self.last: Completion | None = None
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._messages = list(self._system)
        self._text = ""

    def ask(self, text: str, progress: ProgressLine) -> Stream:
        """Return the stream that answers a message; `keep` adds both to the conversation."""
        if self._template:
            ids = self._llm.chat_ids([*self._messages, {"role": "user", "content": text}])
        else:
            ids = self._llm.prompt_ids(self._grown(text))
        return self._llm.stream(ids, **self._options, progress=reading(self._llm, ids, progress))

    def keep(self, text: str, completion: Completion) -> None:
        """Add a message and its answer, a stopped one too; a message without any answer is forgotten."""
        self.last = completion
        if not completion.text:
            return
        self._text = self._grown(text) + completion.text
        self._messages.append({"role": "user", "content": text})
        self._messages.append({"role": "assistant", "content": completion.text})

    def _grown(self, text: str) -> str:
        return f"{self._text}\n{text}" if self._text else text


def chat(llm: LLM, system: str | None, raw: bool, options: dict[str, Any]) -> int:
    """Talk until the user leaves; returns the exit code."""
    conversation = Conversation(llm, system, raw, options)
    with contextlib.suppress(ImportError):  # line editing, where Python has it
        import readline  # noqa: F401
    kind = "" if llm.chat_template is not None and not raw else " continues your text (no chat template)"
    print(f"{llm.name}{kind}; /help lists commands, Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        if line == "/exit":
            return 0
        if line.startswith("/"):
            _command(line, conversation, llm)
        elif line:
            _turn(line, conversation, llm)


def _command(line: str, conversation: Conversation, llm: LLM) -> None:
    if line == "/help":
        for name, meaning in COMMANDS.items():
            print(f"{name:<8} {meaning}", file=sys.stderr)
        print("Ctrl-C   stop the answer", file=sys.stderr)
    elif line == "/clear":
        conversation.clear()
        print("The conversation starts anew.", file=sys.stderr)
    elif line == "/stats":
        if conversation.last is None:
            print("No answer yet.", file=sys.stderr)
        else:
            print(figures(conversation.last, llm.plan, peak_rss_bytes(), llm.runner.device_used_bytes), file=sys.stderr)
            if llm.runner.stages and (pruned := llm.runner.stages.last):
                print(pruned, file=sys.stderr)
    else:
        near = difflib.get_close_matches(line.split()[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists the commands."
        print(f"There is no command {line.split()[0]}; {hint}", file=sys.stderr)


def _turn(line: str, conversation: Conversation, llm: LLM) -> None:
    """Ask, and print the answer as it comes; errors end the turn, not the chat."""
    try:
        with cancelling(llm) as cancelled, ProgressLine() as progress:
            stream = conversation.ask(line, progress)
            for piece in stream:
                print(piece, end="", flush=True)
                if cancelled.is_set():
                    stream.close()
        print(flush=True)
    except CancelledError:  # before there was an answer
        print("\n(stopped)", file=sys.stderr)
        return
    except EdgeInferError as error:
        say(f"{error} /clear forgets the conversation.")
        return
    conversation.keep(line, stream.completion)
    if stream.completion.finish_reason == "cancelled":
        print("(stopped)", file=sys.stderr)
