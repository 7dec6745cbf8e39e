"""Positions at which a long text can be cut so that its parts, tokenised one by one, give exactly the ids of the whole.

Tokenising takes some 200 bytes of memory for each byte of its text and cannot be interrupted, so long texts are
tokenised in parts:

* The patterns that split text into words for byte-level BPE (GPT-2, Llama 3, Qwen2) match letters greedily and without
  lookahead, so a word ends between a letter and a non-letter. Merges never cross the ends of words. There is no cut
  before a character that may compose with the letter before it (NFC).
* If a text is split at its spaces and each word is tokenised by itself (Metaspace, as in T5), a cut is between a letter
  and a space, which begins the next part as it begins a word. No normaliser may look across it.
* If spaces become a mark and nothing splits the text (Llama 2), a merge across a cut would make a token that contains
  the two characters beside the cut in sequence. If the vocabulary has no such token, no merge crosses. All parts but
  the first are tokenised without the mark that the normaliser puts before a text.

Other tokenizers get their texts whole: a unigram model without splits at spaces adds scores along the whole text, and
the sums of a part may round to another choice.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

from ..base.dataclass import dataclass
from ..errors import CancelledError
from .pieces import SPACE_MARK

PART = 16_384
"""Characters of a part, but for the way to the next cut: a few megabytes and tens of milliseconds."""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pattern for splitting text into words; Llama 3 takes up to three digits together."""
_LETTERS = ("A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0391-\u03a1\u03b1-\u03c9\u0410-\u044f"
            "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3")
_ENDS = " \n\t.,;:!?\"\u2026\u201c\u201d\u3000-\u3002\u300c-\u300f\uff01\uff0c\uff1f"
"""Some letters, and some characters that are none and compose with none."""
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_WIDE_CUT = re.compile(f"(?<=[{_LETTERS}])(?=[{_ENDS}])")
_ACROSS = re.compile(f"[A-Za-z][ {SPACE_MARK}]|^ ")
_MARKS = [{"type": "Prepend", "prepend": SPACE_MARK},
          {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}]
_WORDS = re.compile(f"(?<=[{_LETTERS}])(?= [{_LETTERS}])")
_ACROSS_WORDS = re.compile(f"[{_LETTERS}][ {SPACE_MARK}]|^[ {SPACE_MARK}]")
_BY_CHARACTER = {"NFC", "NFD", "NFKC", "NFKD", "Precompiled", "Nmt"}
"""Normalisers that change a letter and a space after it as each by itself."""
_SPACES = ({"Regex": " {2,}"}, {"String": "  "}, {"String": " "})
"""Patterns of spaces that a normaliser may replace."""
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
"""Tokens of characters that have none of their own."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Cuts:
    """Places where a tokenizer's texts can be cut."""

    find: Callable[[str, int], int | None]
    """Returns the first cut of a text at an index or after it; it looks at two characters after a cut at most."""
    skipped: int = 0
    """Characters that are left out at a cut."""
    continues: bool = False
    """Whether parts but the first are tokenised as the continuation of a text."""


def parts(pieces: Iterable[str], cuts: Cuts) -> Iterator[str]:
    """Yield the parts of a text that comes in pieces.

    The parts are the same however the text comes, and no more of it is held than a part and a piece.
    """
    text, seen = "", 0
    for piece in pieces:
        text, start = text + piece, 0
        while len(text) - start > PART and (found := cuts.find(text, max(start + PART, seen))) is not None:
            yield text[start:found]
            start = found + cuts.skipped
        seen = max(len(text) - start - 2, 0)  # a cut is seen by the two characters after it
        text = text[start:]
    yield text


def cuts_of(tokenizer: Any, parse_special: bool) -> Cuts | None:
    """Return where texts may be cut, None if cuts are not known to be exact.

    Parameters
    ----------
    tokenizer : a ``tokenizers.Tokenizer``
    parse_special : whether special tokens written in a text are such
    """
    model = tokenizer.model
    if getattr(model, "dropout", None):
        return None
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if parse_special or not token.special]
    normalizer, words = _steps(tokenizer.normalizer), _steps(tokenizer.pre_tokenizer)
    if _is_split_at_spaces(normalizer, words):
        return None if any(map(_is_near_words, added)) else Cuts(_searching(_WORDS))
    if type(model).__name__ != "BPE":
        return None
    narrow = not any(_is_near_spaces(token) for token in added)
    alone = not normalizer and [step["type"] for step in words] == ["Metaspace"]
    if alone or (normalizer == _MARKS and not words):
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        if any(token.single_word for token in added):
            return None
        if not (model.ignore_merges or (normalizer and any(token.normalized for token in added))):
            merged = any(_BYTE.search(one) for one in vocabulary.keys() - BYTES)
            fallback = model.byte_fallback and vocabulary.keys() >= BYTES and not merged
            return between_pairs(vocabulary, fallback, [token.content for token in added])
        return Cuts(_searching(_CUT), 1) if normalizer and narrow and not _any_across(vocabulary) else None
    byte_level = bool(words) and words[-1]["type"] == "ByteLevel"
    if not (byte_level and narrow) or [step["type"] for step in normalizer] not in ([], ["NFC"]):
        return None
    splits = [step for step in words[:-1] if step["type"] != "Digits"]
    if not (len(splits) == 1 and _is_known(splits[0]) if not words[-1].get("use_regex", True) else not splits):
        return None
    wide = not words[-1].get("add_prefix_space", True) and not any(
        token.single_word or token.rstrip or _WIDE_CUT.search(token.content) for token in added)
    return Cuts(_searching(_WIDE_CUT if wide else _CUT))


def between_pairs(pieces: Iterable[str], any_character: bool, added: Collection[str]) -> Cuts:
    """Return the cuts between two characters that no token has one after the other.

    Parameters
    ----------
    pieces : all that merges can make, spaces as marks
    any_character : characters that are not pieces become bytes, which are not merged; else they may be joined, so that
        there is no cut beside them
    added : tokens that are found in a text before merging; there is no cut after or before one either
    """
    pairs: set[str] = set()
    single: set[str] = set()
    for piece in (*pieces, *added):
        piece = piece.replace(SPACE_MARK, " ")
        pairs.update(map("".join, pairwise(piece)))
        if len(piece) == 1:
            single.add(piece)
    firsts, lasts = {one[0] for one in added}, {" ", SPACE_MARK, *(one[-1] for one in added)}

    def find(text: str, start: int) -> int | None:
        for at in range(max(start, 1), len(text)):
            left, right = text[at - 1], text[at].replace(SPACE_MARK, " ")
            if left + right in pairs or left in lasts or text[at] in firsts:
                continue
            if any_character or (left in single and right in single):
                return at
        return None

    return Cuts(find, continues=True)


def _searching(pattern: re.Pattern[str]) -> Callable[[str, int], int | None]:
    def find(text: str, start: int) -> int | None:
        found = pattern.search(text, start)
        return found.end() if found else None
    return find


def _is_split_at_spaces(normalizer: list[dict[str, Any]], words: list[dict[str, Any]]) -> bool:
    """Return whether every space begins a word, of which the model sees one at a time."""
    marks = [step for step in words if step["type"] == "Metaspace"]
    others = {step["type"] for step in words} - {"Metaspace"}
    if len(marks) != 1 or not marks[0].get("split", True) or not others <= {"WhitespaceSplit", "Digits", "Punctuation"}:
        return False
    return all(step["type"] in _BY_CHARACTER or (step["type"] == "Replace" and step.get("pattern") in _SPACES
                                                 and step.get("content") in (" ", SPACE_MARK))
               or (step["type"] == "Strip" and not step.get("strip_left")) for step in normalizer)


def _is_near_words(token: Any) -> bool:
    """Return whether an added token may reach over a cut between a letter, a space and another letter."""
    strips = (token.lstrip and token.content[:1].isalpha()) or (token.rstrip and token.content[-1:].isalpha())
    return bool(strips or _ACROSS_WORDS.search(token.content))


def _is_near_spaces(token: Any) -> bool:
    """Return whether an added token may reach over a cut between a letter and a space."""
    strips = (token.lstrip and token.content[:1].isalpha()) or (token.rstrip and token.content[-1:].isalpha())
    return bool(strips or _ACROSS.search(token.content))


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
    """Raise `CancelledError` once the tokens are no longer wanted."""
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
