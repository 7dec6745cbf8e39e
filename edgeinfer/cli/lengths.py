"""Lengths of a prompt and an answer in a context: what `run` refuses, and where it stops an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.validation import checked, integer
from ..errors import UsageError

if TYPE_CHECKING:
    from ..graph import ModelConfig

MAX_TOKENS = 1 << 24
"""More tokens than any model has in its context; a larger number is a slip."""
DEFAULT_PROMPT = 512
TOKENS = integer(1, MAX_TOKENS, f"from 1 to {MAX_TOKENS} tokens")
"""Rule of a length."""


class Words(NamedTuple):
    """Names by which messages call the lengths: options, arguments in Python, or fields of the page."""

    ctx: str
    prompt: str
    answer: str


FLAGS, KEYWORDS = Words("--ctx", "-p", "-n"), Words("ctx", "prompt", "answer")


class Lengths(NamedTuple):
    """Tokens of a run."""

    ctx: int
    prompt: int
    answer: int | None
    notes: tuple[str, ...]
    """Remarks: that `run` refuses the context, and where it stops the answer."""


def lengths_of(model: ModelConfig, ctx: int | None, prompt: int | None, answer: int | None, words: Words) -> Lengths:
    """Return the tokens of a run of a model, as `run` takes them.

    Parameters
    ----------
    model : ModelConfig
    ctx, prompt, answer : int, optional
        From 1 on; the answer is not a question without its length.
    words : Words

    Raises
    ------
    UsageError
        The prompt does not fit the context, or leaves no room for an answer.
    """
    from edgeinfer.memory_planner import default_ctx

    longest, room = model.max_position_embeddings, ctx or default_ctx(model)
    notes = beyond(room, longest)
    prompt = prompt or min(DEFAULT_PROMPT, room if answer is None else max(room // 2, 1))
    if prompt + (answer is not None) > room:
        what = "does not fit" if prompt > room else "leaves no room for an answer in"
        raise UsageError(f"{words.prompt} {prompt} {what} a context of {room} tokens; lower it"
                         f"{_or_raise(words, prompt + (answer or 0), longest)}.")
    if answer is not None and (said := cut(room, answer, longest, words, prompt)):
        answer, notes = room - prompt, [*notes, said]
    return Lengths(room, prompt, answer, tuple(notes))


def beyond(ctx: int, longest: int) -> list[str]:
    """Return the remark on a context that the model does not have, if it is one."""
    return [f"The context of {ctx} tokens exceeds the model's {longest}, so run refuses it."] if ctx > longest else []


def cut(ctx: int, answer: int, longest: int, words: Words, prompt: int | None = None) -> str:
    """Return the sentence on an answer that the context cuts off; empty where it has room."""
    if (prompt or 1) + answer <= ctx:
        return ""
    behind = "" if prompt is None else f" after {ctx - prompt}, behind a prompt of {prompt}"
    return (f"An answer of {answer} tokens does not fit a context of {ctx}: run stops it{behind}; lower "
            f"{words.answer}{_or_raise(words, (prompt or 1) + answer, longest)}.")


def _or_raise(words: Words, needed: int, longest: int) -> str:
    """Return the other remedy, for models that have so many positions."""
    return f", or give {words.ctx} {needed}" if needed <= longest else f"; the model takes {longest} tokens at most"


def check_lengths(words: Sequence[str], *values: Any) -> list[int | None]:
    """Return lengths in the order of their names; raises `UsageError` for one that no model has."""
    return [None if value is None else checked(word, value, TOKENS) for word, value in zip(words, values, strict=False)]
