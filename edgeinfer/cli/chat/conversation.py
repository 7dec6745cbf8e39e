"""A conversation in a chat: its turns, its settings, and the file that keeps both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ...base.files import open_plain, os_errors, replacement
from ...base.process import peak_rss_bytes
from ...base.strict_json import parse_json
from ...base.validation import PATH, checked, similar
from ...config import GenerationConfig
from ...errors import ContextError, EdgeInferError, UsageError
from ..output import figures
from .line_editor import EDITOR_BYTES

if TYPE_CHECKING:
    from ...engine import Completion, Stream
    from ...llm import LLM
    from ..progress import ProgressLine

SETTINGS = {
    "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "seed": "seed",
    "max-tokens": "max_tokens", "stop": "stop", "repeat-penalty": "repetition_penalty",
    "presence-penalty": "presence_penalty", "frequency-penalty": "frequency_penalty",
}
"""Settings that `/set` changes, by the name of the flag, with the field of `GenerationConfig`."""
OTHERS_WORDS = {"temperature": "temp", "num-predict": "max-tokens", "n": "max-tokens"}
"""ollama's words for settings, and the short flag."""
MAX_FILE_BYTES = 64 << 20
KIND = "edgeinfer conversation"
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(GenerationConfig)}


class Conversation:
    """The turns so far: messages where the model has a chat template, else one growing text.

    Parameters
    ----------
    llm : answers
    system : first message of every conversation
    raw : continue text even if there is a template
    options : of each request

    Attributes
    ----------
    name : str
        The model.
    template : bool
        Whether it has a chat template, which is used.
    turns : list of (str, str)
        Each message with its answer.
    last : Completion or None
        The last answer.
    """

    def __init__(self, llm: LLM, system: str | None, raw: bool, options: dict[str, Any]):
        self._llm = llm
        self._start(llm.name, llm.chat_template is not None and not raw, system, {**options, "reuse": True})

    def _start(self, name: str, template: bool, system: str | None, options: dict[str, Any]) -> None:
        self.name, self.template, self.options = name, template, options
        self._begun_with = dict(options)
        self.turns: list[tuple[str, str]] = []
        self.last: Completion | None = None
        self.system: str | None = None
        if system is not None:
            self.set_system(system)

    def set_system(self, text: str) -> None:
        """Change the system message; an empty one removes it."""
        if not self.template:
            raise UsageError("A system message needs a chat template, and this model has none; put it in your first "
                             "message.")
        self.system = text or None

    def set(self, name: str, text: str) -> str:
        """Change a setting, and return its name; ``default`` is the value at the beginning of the chat.

        Raises `UsageError` for an unknown setting or a value that it does not take.
        """
        name = name.removeprefix("--").replace("_", "-")
        name = OTHERS_WORDS.get(name, name)
        if name not in SETTINGS:
            near = similar(name, [*SETTINGS, "system"])
            hint = f"did you mean {near[0]}?" if near else f"settings are {', '.join(SETTINGS)} and system."
            raise UsageError(f"There is no setting {name}; {hint}")
        field = SETTINGS[name]
        value = self._begun_with.get(field) if text == "default" else _plain(text) if field != "stop" else (text,)
        asked: dict[str, Any] = {field: value}
        config = GenerationConfig(**asked)  # which checks it
        self.options[field] = value if value is None else getattr(config, field)
        return name

    def setting(self, name: str) -> Any:
        """Return the value of a setting as `/show` prints it."""
        value = self.options.get(SETTINGS[name])
        value = DEFAULTS[SETTINGS[name]] if value is None else value
        if name == "seed" and value is None:
            return "random"
        return ", ".join(map(repr, value)) or "none" if isinstance(value, tuple) else value

    def clear(self) -> None:
        """Start over, with the same settings."""
        self.turns = []

    def ids(self, text: str, skipped: int = 0) -> list[int]:
        """Return the tokens of a prompt: the turns, but for the oldest ones that are skipped, and a message."""
        turns = self.turns[skipped:]
        return self._llm.chat_ids(self._messages(turns, text)) if self.template else \
            self._llm.prompt_ids(self._text(turns, text))

    def _messages(self, turns: list[tuple[str, str]], text: str) -> list[dict[str, str]]:
        """Return turns and a message for a model with a chat template."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for message, answer in turns:
            messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": text}]

    def _text(self, turns: list[tuple[str, str]], text: str) -> str:
        """Return turns and a message as the text that a model without a chat template continues."""
        parts = [part for message, answer in turns for part in (f"\n{message}", answer)]
        return "".join([*parts, f"\n{text}"])[1:]

    def ask(self, text: str, progress: ProgressLine) -> Stream:
        """Return the stream that answers a message; `keep` adds both to the conversation.

        Raises `ContextError` if the context has no room for one token of an answer.
        """
        from ...engine import too_long
        from ..generating import reading

        ids = self.ids(text)
        if len(ids) >= self.ctx:
            raise too_long(f"has {len(ids)} tokens", len(ids) + 1, self._llm.runner)
        return self._llm.stream(ids, **self.options, progress=reading(self._llm, ids, progress))

    def cancel(self) -> None:
        """End the answer that is being written."""
        self._llm.cancel()

    @property
    def ctx(self) -> int:
        """Tokens of the context."""
        return int(self._llm.runner.config.ctx or 0)

    def used(self) -> str:
        """Return how full the context is, as the end of a line."""
        used = min(len(self.ids("")), self.ctx) if self.turns else 0
        return f"{used:,} of {self.ctx:,} tokens, "

    def full(self, done: Completion) -> bool:
        """Return whether an answer has filled the context."""
        return done.prompt_tokens + done.completion_tokens >= self.ctx

    def larger(self) -> tuple[int, int] | None:
        """Return a larger context that fits the budget, with the bytes of its plan; None if there is none."""
        from edgeinfer.memory_planner import largest_ctx, to_request, within

        from ...runtime import Session, planner_of

        runner = self._llm.runner
        if not isinstance(runner, Session):
            return None
        planner, own = planner_of(runner.bundle, runner.config.recipe), runner.model.max_position_embeddings
        budget = runner.budget_bytes - EDITOR_BYTES
        most = largest_ctx(planner, runner.config, budget, min(2 * self.ctx, own))
        found = within(planner, to_request(runner.config, most), budget) if most > self.ctx else None
        return (most, found.total_bytes) if found else None

    @property
    def no_larger(self) -> str:
        """Why `larger` has found no context."""
        if self.ctx >= self._llm.runner.model.max_position_embeddings:
            return "A larger context is not possible with this model."
        return "A larger context does not fit the memory budget."

    def statistics(self, done: Completion) -> Iterator[str]:
        """Yield lines about an answer."""
        llm = self._llm
        yield figures(done, llm.plan, peak_rss_bytes(), llm.runner.device_used_bytes)
        if llm.runner.prefill_strategy and (prompt := llm.runner.prefill_strategy.last):
            yield str(prompt)

    def keep(self, text: str, completion: Completion) -> None:
        """Add a message and its answer, a stopped one too; a message without any answer is forgotten."""
        self.last = completion
        if completion.text:
            self.turns.append((text, completion.text))

    def too_many(self, text: str) -> int | None:
        """Return how many of the oldest turns have to go so that a message and an answer have room; None if the
        message alone has none.

        An answer has room where a quarter of the context is left, or as many tokens as it may have.
        """
        most = self.options.get("max_tokens")
        room = max(min(DEFAULTS["max_tokens"] if most is None else most, self.ctx // 4), 1)
        for least in (room, 1):
            for skipped in range(len(self.turns) + 1):
                try:
                    if len(self.ids(text, skipped)) + least <= self.ctx:
                        return skipped
                except ContextError:
                    continue
        return None

    def save(self, name: str) -> None:
        """Write the conversation to a file, over an older conversation only.

        Raises `EdgeInferError` if that cannot be done.
        """
        path = checked("file", name, PATH)
        try:
            _read(path)
        except FileNotFoundError:
            pass
        except UsageError:
            raise UsageError(f"{path} exists and is not a saved conversation; give another name.") from None
        kept = {field: self.options[field] for field in SETTINGS.values() if self.options.get(field) is not None}
        report = {"kind": KIND, "model": self.name, "system": self.system, "options": kept, "turns": self.turns}
        with os_errors(EdgeInferError, f"{path} cannot be written"), replacement(path) as file:
            file.write(json.dumps(report, indent=1).encode() + b"\n")

    def load(self, name: str) -> str:
        """Continue a conversation from a file, and return its model.

        Raises `EdgeInferError` if the file is not one; this conversation is then as before.
        """
        path = checked("file", name, PATH)
        try:
            report = _read(path)
        except FileNotFoundError:
            raise UsageError(f"There is no file {path}.") from None
        config = GenerationConfig(**{field: report["options"].get(field) for field in SETTINGS.values()})
        if report["system"] is not None:
            self.set_system(report["system"])
        else:
            self.system = None
        self.options |= {field: getattr(config, field) for field in report["options"] if field in SETTINGS.values()}
        self.turns = [(message, answer) for message, answer in report["turns"]]
        return str(report["model"])


def _plain(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read(path: str) -> dict[str, Any]:
    """Return a saved conversation; raises `UsageError` for a file that is none, and `FileNotFoundError`."""
    try:
        with open_plain(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        report = parse_json(data) if len(data) <= MAX_FILE_BYTES else None
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        report = None
    turns = report.get("turns") if isinstance(report, dict) else None
    good = isinstance(report, dict) and report.get("kind") == KIND and isinstance(report.get("options"), dict) \
        and isinstance(report.get("system"), str | None) and isinstance(report.get("model"), str) \
        and isinstance(turns, list) and all(
            isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn) for turn in turns)
    if not good:
        raise UsageError(f"{path} is not a conversation that /save has written.")
    assert isinstance(report, dict)
    return report
