"""Where a long text may be cut so that its parts, tokenised one by one, give exactly the ids of the whole.

Tokenising takes some 200 bytes of memory for each byte of its text and cannot be interrupted, so long texts go through
it in parts. A cut lies between an ASCII letter and a single space that another one follows. There

* the patterns that split text into words for byte-level BPE always begin a new word with the space: letters stand at
  the end of a word only, and the space joins the letters behind it (GPT-2, Llama 3, Qwen2; digits on their own change
  nothing). So the merges of both sides never meet;
* where spaces become a mark and nothing splits the text (Llama 2), merges cannot cross the cut as long as no token has
  a letter before a mark. The normaliser puts a mark before each part, so the space itself is left out.

Other tokenizers get their texts whole.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..errors import CancelledError
from .pieces import SPACE_MARK

PART = 16_384
"""Characters of a part, but for the way to the next cut: a few megabytes and tens of milliseconds."""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 cuts text into words; Llama 3 takes up to three digits together."""
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_ACROSS = re.compile(f"[A-Za-z][ {SPACE_MARK}]|^ ")
_MARKS = [{"type": "Prepend", "prepend": SPACE_MARK},
          {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}]
_Result = TypeVar("_Result")


def parts(pieces: Iterable[str], skipped: int) -> Iterator[str]:
    """Yield the parts of a text that comes in pieces; `skipped` characters are left out at each cut.

    The parts are the same however the text comes, and no more of it is held than a part and a piece.
    """
    text, seen = "", 0
    for piece in pieces:
        text, start = text + piece, 0
        while len(text) - start > PART and (found := _CUT.search(text, max(start + PART, seen))):
            yield text[start : found.end()]
            start = found.end() + skipped
        seen = max(len(text) - start - 2, 0)  # a cut is seen by the two characters behind it
        text = text[start:]
    yield text


def skipped_at_cuts(tokenizer: Any) -> int | None:
    """Return how many characters are left out at a cut, None where cuts are not known to be exact.

    Parameters
    ----------
    tokenizer : a ``tokenizers.Tokenizer``
    """
    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.dropout:
        return None
    for token in tokenizer.get_added_tokens_decoder().values():
        strips = (token.lstrip and token.content[:1].isalpha()) or (token.rstrip and token.content[-1:].isalpha())
        if strips or _ACROSS.search(token.content):
            return None
    normalizer, words = _steps(tokenizer.normalizer), _steps(tokenizer.pre_tokenizer)
    if normalizer == _MARKS and not words:
        return None if _any_across(tokenizer.get_vocab(with_added_tokens=False)) else 1
    byte_level = bool(words) and words[-1]["type"] == "ByteLevel"
    if not byte_level or [step["type"] for step in normalizer] not in ([], ["NFC"]):
        return None
    splits = [step for step in words[:-1] if step["type"] != "Digits"]
    if words[-1].get("use_regex", True):
        return 0 if not splits else None
    return 0 if len(splits) == 1 and _is_known(splits[0]) else None


def _any_across(vocabulary: Iterable[str]) -> bool:
    return any(map(re.compile(f"[A-Za-z]{SPACE_MARK}").search, vocabulary))


def _is_known(split: dict[str, Any]) -> bool:
    pattern = (split.get("pattern") or {}).get("Regex", "").replace(r"\p{N}{1,3}", r"\p{N}")
    return pattern == QWEN2_SPLIT and split.get("behavior") == "Isolated" and not split.get("invert")


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normaliser or pre-tokenizer."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state.get("normalizers") or state.get("pretokenizers") or [state]


def check_wanted(stopped: Callable[[], bool] | None) -> None:
    """Raise `CancelledError` once nobody wants the tokens any more."""
    if stopped and stopped():
        raise CancelledError("The request was cancelled while its prompt was tokenised.")


def interruptible(work: Callable[[], _Result], stopped: Callable[[], bool] | None = None) -> _Result:
    """Return what a long call into a library gives.

    Ctrl-C, or `stopped`, leaves the call behind in a thread that ends with it or with the process.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        check_wanted(stopped)
    if errors:
        raise errors[0]
    return results[0]
