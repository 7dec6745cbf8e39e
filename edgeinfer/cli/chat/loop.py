"""Chat on a terminal: a conversation with history, and commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...base.validation import similar
from ...errors import CancelledError, ContextError, EdgeInferError
from ..generating import cancelling
from ..output import folded, folded_for_terminal, say
from ..progress import ProgressLine
from .conversation import SETTINGS, Conversation
from .line_editor import EDITOR_BYTES, draws, editing_reader, message, plain_reader

if TYPE_CHECKING:
    from ...llm import LLM

HELP = (
    ("/set NAME VALUE", "change a setting; /show lists them"),
    ("/system TEXT", "change the system message"),
    ("/show", "show the model, its settings and how full the context is"),
    ("/stats", "show speed and memory of the last answer"),
    ("/clear", "start a new conversation"),
    ("/drop [N]", "forget the N oldest turns, or as many as necessary"),
    ("/save FILE", "save the conversation"),
    ("/load FILE", "continue a saved conversation"),
    ("/help, /?", "list these commands"),
    ("/bye, Ctrl-D", "leave"),
    ('"""', "begins and ends a message of several lines"),
    ("Alt-Enter", "starts a new line"),
    ("Ctrl-C", "stops the answer"),
)
LEAVING = ("/bye", "/exit", "/quit")
OLLAMAS = "parameter "
"""ollama's `/set parameter NAME VALUE`."""


def chat(llm: LLM, system: str | None, raw: bool, options: dict[str, Any]) -> int:
    """Talk with a model until the user leaves; returns the exit code."""
    return talk(Conversation(llm, system, raw, options), reader(llm))


def talk(conversation: Conversation, read: Callable[[], str]) -> int:
    """Hold a conversation until the user leaves; returns the exit code."""
    kind = "" if conversation.template else " has no chat template and continues your text"
    print(f"{conversation.name}{kind}; /help lists commands, Ctrl-D leaves.", file=sys.stderr)
    session = Chat(conversation)
    while True:
        try:
            text = message(read())
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /bye leaves)", file=sys.stderr)
            continue
        if text in LEAVING:
            return 0
        if text:
            try:
                session.take(text)
            except EdgeInferError as error:
                say(str(error))
            except KeyboardInterrupt:
                print("\n(stopped)", file=sys.stderr)


def reader(llm: LLM) -> Callable[[], str]:
    """Return the reader of messages: the editor, which is then part of the plan, if terminal and budget allow it."""
    if not draws():
        return plain_reader()
    plan, budget = llm.runner.plan, getattr(llm.runner, "budget_bytes", None)
    if budget is not None and plan.total_bytes + EDITOR_BYTES > budget:
        say(f"the message editor takes {format_size(EDITOR_BYTES)}, more than the budget of {format_size(budget)} "
            "leaves, so each line is a message.")
        return plain_reader()
    region = replace(plan.region("python"), name="editor", nbytes=EDITOR_BYTES, reason="editor of the chat's messages")
    llm.runner.plan = replace(plan, regions=(*plan.regions, region))
    return editing_reader()


class Chat:
    """The commands of a chat, and its turns."""

    def __init__(self, conversation: Conversation):
        self._conversation = conversation
        self._waiting = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set, "/system": self._system, "/show": self._show, "/stats": self._stats,
            "/clear": self._clear, "/drop": self._drop, "/save": self._save, "/load": self._load,
            "/help": self._help, "/?": self._help,
        }

    def take(self, text: str) -> None:
        """Obey a command, or answer a message."""
        if not text.startswith("/"):
            self._answer(text)
            return
        name, _, rest = text.partition(" ")
        if command := self._commands.get(name):
            try:
                command(rest.strip())
            except EdgeInferError as error:
                say(str(error))
            return
        near = similar(name, [*self._commands, *LEAVING])
        hint = f"did you mean {near[0]}?" if near else "/help lists the commands."
        _tell(f"There is no command {name}; {hint}")

    def _answer(self, text: str) -> None:
        """Ask, and print the answer as it comes; errors end the turn, not the chat."""
        conversation = self._conversation
        self._waiting = ""
        try:
            with cancelling(conversation.cancel) as cancelled, ProgressLine() as progress:
                stream = conversation.ask(text, progress)
                for piece in stream:
                    print(piece, end="", flush=True)
                    if cancelled.is_set():
                        stream.close()
            print(flush=True)
        except CancelledError:  # before there was an answer
            _tell("\n(stopped)")
            return
        except ContextError:
            self._offer(text)
            return
        except EdgeInferError as error:
            say(f"{error} /clear starts a new conversation.")
            return
        conversation.keep(text, done := stream.completion)
        if done.finish_reason == "cancelled":
            _tell("(stopped)")
        elif done.finish_reason == "length" and conversation.full(done):
            _tell(f"(The context of {conversation.ctx} tokens is full, so the answer ends here. /drop forgets the "
                  "oldest turns, /clear all of them.)")

    def _offer(self, text: str) -> None:
        """Suggest remedies if a conversation and a message do not fit the context."""
        conversation = self._conversation
        skipped = conversation.too_many(text)
        before = "" if skipped is None else f" and the {_turns(len(conversation.turns))} before it"
        _tell(f"This message{before} leave no room for an answer in the context of {conversation.ctx} tokens. Options:"
              if before else f"This message alone fills the context of {conversation.ctx} tokens. Options:")
        if skipped:
            self._waiting = text
            _option("/drop", f"forget the {_oldest(skipped)} of {len(conversation.turns)} and answer")
            _option("/clear", "start a new conversation and ask again")
        else:
            _tell("  send a shorter message")
        if larger := conversation.larger():
            ctx, nbytes = larger
            _option(f"-c {ctx}", f"/save FILE and /bye, then edgeinfer run {conversation.name} -c {ctx} (takes "
                                 f"{format_size(nbytes)}) and /load FILE")
        else:
            _tell(conversation.no_larger)

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix(OLLAMAS).strip().partition(" ")
        if name == "system":
            self._system(value.strip())
        elif not value:
            self._show("")
        else:
            name = self._conversation.set(name, value.strip())
            _tell(f"{name} is {self._conversation.setting(name)}.")

    def _system(self, text: str) -> None:
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]
        self._conversation.set_system(text)
        _tell("The system message is set." if text else "There is no system message.")

    def _show(self, rest: str) -> None:
        conversation = self._conversation
        rows = [("model", conversation.name), ("context", f"{conversation.used()}{_turns(len(conversation.turns))}")]
        if conversation.template:
            rows.append(("system", conversation.system or "none"))
        rows += [(name, str(conversation.setting(name))) for name in SETTINGS]
        for name, value in rows:
            print(f"{name:<18} {value}", file=sys.stderr)

    def _stats(self, rest: str) -> None:
        if self._conversation.last is None:
            _tell("No answer yet.")
            return
        for line in self._conversation.statistics(self._conversation.last):
            print(folded_for_terminal(line), file=sys.stderr)

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        self._waiting = ""
        _tell("Started a new conversation.")

    def _drop(self, rest: str) -> None:
        conversation, waiting = self._conversation, self._waiting
        if rest and not (rest.isascii() and rest.isdigit() and len(rest) < 7 and int(rest)):
            _tell("/drop takes a number of turns, as in /drop 2, or nothing.")
            return
        wanted = int(rest) if rest else (conversation.too_many(waiting) if waiting else None) or 1
        n = min(wanted, len(conversation.turns))
        del conversation.turns[:n]
        _tell(f"Forgot the {_oldest(n)}; {len(conversation.turns)} left." if n else "There is no turn to drop.")
        if waiting and n:
            self._answer(waiting)

    def _save(self, rest: str) -> None:
        if not rest:
            _tell("/save needs a file name: /save FILE.")
            return
        self._conversation.save(rest)
        _tell(f"Saved {_turns(len(self._conversation.turns))}; /load {rest} continues the conversation.")

    def _load(self, rest: str) -> None:
        if not rest:
            _tell("/load needs a file name: /load FILE.")
            return
        model = self._conversation.load(rest)
        other = "" if model == self._conversation.name else f" of a conversation with {model}"
        _tell(f"Loaded {_turns(len(self._conversation.turns))}{other}.")

    def _help(self, rest: str) -> None:
        for name, meaning in HELP:
            _tell(f"{name:<17} {meaning}")


def _turns(n: int) -> str:
    return f"{n} turn{'s' * (n != 1)}"


def _oldest(n: int) -> str:
    return "oldest turn" if n == 1 else f"{n} oldest turns"


def _option(name: str, meaning: str) -> None:
    print("\n".join(folded(meaning, f"  {name:<10} ")), file=sys.stderr)


def _tell(text: str) -> None:
    for line in text.split("\n"):
        print("\n".join(folded(line)), file=sys.stderr)
