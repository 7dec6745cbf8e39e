"""Positions at which a long text can be cut so that its parts, tokenised one by one, give exactly the ids of the whole.

Tokenising takes some 200 bytes of memory for each byte of its text and cannot be interrupted, so long texts are
tokenised in parts:

* If no pattern that splits text into words for byte-level BPE (GPT-2, Llama 3, Qwen, gpt-oss, DeepSeek) can match a
  letter with a space or sign after it (`patterns`), and one of them matches every letter, a word ends between the two.
  Merges never cross the ends of words. There is no cut before a character that may compose with the letter before it
  (NFC).
* If a text is split at its spaces and each word is tokenised by itself (Metaspace, as in T5), a cut is between a
  letter and a space, which begins the next part as it begins a word. No normaliser may look across it.
* If spaces become a mark and nothing splits the text (Llama 2, Gemma), a merge across a cut before a space or sign
  would make a token that contains the two characters beside the cut in sequence. If the vocabulary has no such token,
  no merge crosses. All parts but the first are tokenised without the mark that the normaliser puts before a text.

Other tokenizers get their texts whole: a unigram model without splits at spaces adds scores along the whole text, and
the sums of a part may round to another choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from .long_texts import WHITE, Cuts
from .patterns import matches_each, separates
from .pieces import SPACE_MARK

_ASCII = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LETTERS = _ASCII + "".join(chr(code) for first, last in (
    (0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x2AF), (0x391, 0x3A1), (0x3B1, 0x3C9), (0x410, 0x44F), (0x3041, 0x3096),
    (0x30A1, 0x30FA), (0x4E00, 0x4FFF), (0xAC00, 0xAC7F), (0xB2E4, 0xB2E4), (0xC694, 0xC694),
) for code in range(first, last + 1))
_ENDS = " \n\t.,;:!?\"\u2026\u201c\u201d\u3000\u3001\u3002\u300c\u300d\u300e\u300f\uff01\uff0c\uff1f"
"""Some letters, among them frequent ones of each script, and some characters that are none and compose with none."""
_CUT, _WIDE_CUT = r"(?<=[A-Za-z])(?= [A-Za-z])", f"(?<=[{_LETTERS}])(?=[{_ENDS}])"
_END, _PAIR = f"[{_ENDS}{SPACE_MARK}]", f"(?s)(?=(.[{_ENDS}]))"
_ACROSS = f"[A-Za-z][ {SPACE_MARK}]|^ "
_MARKS = [{"type": "Prepend", "prepend": SPACE_MARK},
          {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}]
_WORDS = f"(?<=[{_LETTERS}])(?= [{_LETTERS}])"
_ACROSS_WORDS = f"[{_LETTERS}][ {SPACE_MARK}]|^[ {SPACE_MARK}]"
_SPLIT_MARKED = [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]
"""Gemma's, which finds no spaces: its normaliser has made marks of them."""
_BY_CHARACTER = {"NFC", "NFD", "NFKC", "NFKD", "Precompiled", "Nmt"}
"""Normalisers that change a letter and a space after it as each by itself."""
_SPACES = ({"Regex": " {2,}"}, {"String": "  "}, {"String": " "})
"""Patterns of spaces that a normaliser may replace."""
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
"""Tokens of characters that have none of their own."""
_BYTE = "<0x[0-9A-F]{2}>"


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
        return None if any(_is_near(token, _ACROSS_WORDS) for token in added) else Cuts(_searching(_WORDS))
    if type(model).__name__ != "BPE":
        return None
    narrow = not any(_is_near(token, _ACROSS) for token in added)
    alone = not normalizer and [step["type"] for step in words] == ["Metaspace"]
    if alone or (normalizer == _MARKS and not words) or (normalizer == _MARKS[1:] and words in ([], _SPLIT_MARKED)):
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        if any(token.single_word for token in added):
            return None
        if not (model.ignore_merges or (normalizer and any(token.normalized for token in added))):
            merged = any(re.search(_BYTE, one) for one in vocabulary.keys() - BYTES)
            fallback = model.byte_fallback and vocabulary.keys() >= BYTES and not merged
            strips = any(token.lstrip or token.rstrip for token in added)
            return between_pairs(vocabulary, fallback, [token.content for token in added], strips)
        skipped = int(normalizer == _MARKS)
        return Cuts(_searching(_CUT), skipped) if normalizer and narrow and not _any_across(vocabulary) else None
    if not narrow or [step["type"] for step in normalizer] not in ([], ["NFC"]):
        return None
    spaced = any(step["type"] == "ByteLevel" and step.get("add_prefix_space", True) for step in words)
    wide = not any(token.single_word or token.rstrip or re.search(_WIDE_CUT, token.content) for token in added)
    if wide and not spaced and _ends_words(words, _LETTERS, _ENDS):
        return Cuts(_searching(_WIDE_CUT))
    return Cuts(_searching(_CUT)) if _ends_words(words, _ASCII, " ") else None


def between_pairs(pieces: Iterable[str], any_character: bool, added: Collection[str], strips: bool) -> Cuts:
    """Return the cuts before a space or sign that no token has after the character before it.

    Parameters
    ----------
    pieces : all that merges can make, spaces as marks
    any_character : characters that are not pieces become bytes, which are not merged; else they may be joined, so that
        there is no cut beside them
    added : tokens that are found in a text before merging; there is no cut after or before one either
    strips : some of these take the white space beside them; there is no cut after white space
    """
    joined = "\0".join((*pieces, *added)).replace(SPACE_MARK, " ")
    pairs = {found[1] for found in re.finditer(_PAIR, joined)}
    single = set() if any_character else set(re.findall(r"(?s)(?<![^\0])[^\0](?![^\0])", joined))
    firsts, lasts = {one[0] for one in added}, {SPACE_MARK, *(WHITE if strips else " "), *(one[-1] for one in added)}

    ends = re.compile(_END)

    def find(text: str, start: int) -> int | None:
        for end in ends.finditer(text, max(start, 1)):
            left, right = text[end.start() - 1], end[0].replace(SPACE_MARK, " ")
            if left + right in pairs or left in lasts or end[0] in firsts:
                continue
            if any_character or (left in single and right in single):
                return end.start()
        return None

    return Cuts(find, continues=True)


def _searching(pattern: str) -> Callable[[str, int], int | None]:
    compiled = re.compile(pattern)

    def find(text: str, start: int) -> int | None:
        found = compiled.search(text, start)
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


def _is_near(token: Any, across: str) -> bool:
    """Return whether an added token may reach over a cut of this form beside a letter."""
    strips = (token.lstrip and token.content[:1].isalpha()) or (token.rstrip and token.content[-1:].isalpha())
    return bool(strips or re.search(across, token.content))


def _any_across(vocabulary: Iterable[str]) -> bool:
    return any(map(re.compile(f"[A-Za-z]{SPACE_MARK}").search, vocabulary))


def _ends_words(words: list[dict[str, Any]], letters: str, ends: str) -> bool:
    """Return whether a word for byte-level BPE ends between each of these letters and each of these characters.

    Steps after the first pattern that ends words there see each word by itself.
    """
    if "ByteLevel" not in [step["type"] for step in words]:
        return False
    for step in words:
        if step["type"] == "ByteLevel" and step.get("use_regex", True):  # GPT-2's words
            return True
        if step["type"] in ("Digits", "Punctuation") and step.get("behavior", "Isolated") in ("Isolated", "Contiguous"):
            continue  # they look at single characters
        pattern = (step.get("pattern") or {}).get("Regex")
        if step["type"] != "Split" or not pattern or step.get("behavior") != "Isolated" or step.get("invert") \
                or not separates(pattern, letters, ends):
            return False
        if matches_each(pattern, letters):
            return True
    return False


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normaliser or pre-tokenizer."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state.get("normalizers") or state.get("pretokenizers") or [state]
