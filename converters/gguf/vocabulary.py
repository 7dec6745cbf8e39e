"""The vocabulary in a GGUF file's metadata, validated: its length, the range of its ids, and that no piece repeats."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import TokenizerError

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as SentencePiece numbers them too; 0 is undefined and read as normal."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids", "fim_pad_token_id", "fim_rep_token_id",
            "fim_sep_token_id")
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>".split())
"""Texts of tokens that end a text or a turn in some family, whatever their type is, as llama.cpp has them: files name
one or two ids, and their models have learnt to end with others too."""
_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id",
          "pad": "padding_token_id", "cls": "cls_token_id", "mask": "mask_token_id"}
NO_TOKEN = (-1, 2**32 - 1)
"""Values that some converters write for a token that does not exist."""
_PRESUMED: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0}, "t5": {"eos": 1, "unk": 2, "pad": 0},
    "bert": {"cls": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
}
"""Ids that llama.cpp presumes by tokenizer.ggml.model where a file does not say; here only for tokens without text."""


@dataclass(frozen=True)
class Vocabulary:
    """Pieces by id, with their properties."""

    source: str
    """The file, for messages."""
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    named: dict[str, int]
    """Special tokens by role: bos, eos, unk, sep, pad, cls, mask."""
    end_ids: tuple[int, ...]
    """All tokens that end a text or a turn."""

    def of_type(self, *types: int) -> Iterator[tuple[int, str]]:
        """Yield id and text of the tokens of these types."""
        return ((i, self.tokens[i]) for i, kind in enumerate(self.types) if kind in types)

    def text(self, role: str) -> str | None:
        """Return the text of a special token, or None."""
        return self.tokens[self.named[role]] if role in self.named else None


def read_vocabulary(metadata: Mapping[str, Any], model: str, source: str) -> Vocabulary:
    """Return the tokens of the metadata; raises `TokenizerError` if they disagree with each other."""
    tokens = _texts(metadata, source)
    n = len(tokens)
    types = _types(metadata, tokens, source)
    for token_id, text in enumerate(tokens):
        if not text or text == f"[PAD{token_id}]":  # converters write it for rows that no token has
            types[token_id], tokens[token_id] = UNUSED, text or f"[EMPTY{token_id}]"
    ids = dict(zip(tokens, range(n), strict=True))
    if len(ids) < n:
        first = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise damaged(source, f"it has the token {tokens[first]!r:.60} twice, as {first} and as {ids[tokens[first]]}")
    named = _named(metadata, model, types, source)
    first_unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    if first_unknown is not None:
        named.setdefault("unk", first_unknown)
    types = [CONTROL if kind == UNKNOWN else kind for kind in types]  # there is one, and `named` has it
    ends = _end_ids(metadata, tokens, types, ids, source)
    for token_id in ends:
        types[token_id] = CONTROL
    return Vocabulary(source, tokens, types, ids, named, tuple(ends))


def items(metadata: Mapping[str, Any], key: str, source: str) -> list[Any] | None:
    """Return the array under a key as a list, or None."""
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or isinstance(value, range):
        raise damaged(source, f"{PREFIX}{key} is a {type(value).__name__} instead of an array")
    return list(value)


def flag(metadata: Mapping[str, Any], key: str, presumed: bool, source: str) -> bool:
    """Return the truth value under a key."""
    value = metadata.get(PREFIX + key, presumed)
    if not isinstance(value, Hashable) or value not in (True, False):
        raise damaged(source, f"{PREFIX}{key} is {value!r:.60} instead of true or false")
    return bool(value)


def damaged(source: str, why: str) -> TokenizerError:
    """Return the error for metadata that contradict themselves."""
    return TokenizerError(f"The vocabulary in {source} is damaged: {why}; download the file again.")


def scores_of(metadata: Mapping[str, Any], n: int, source: str) -> NDArray[np.float32]:
    """Return the score of each token, which must be numbers."""
    scores = items(metadata, "scores", source)
    if scores is None:
        raise damaged(source, f"it has no scores ({PREFIX}scores), which define the order of merges")
    if len(scores) != n:
        raise damaged(source, f"it has {n} tokens but {len(scores)} scores")
    try:
        found = np.array(scores)
        if found.dtype.kind not in "fiu":
            raise TypeError
        with np.errstate(over="ignore"):
            found = found.astype("<f4")
    except (TypeError, ValueError, OverflowError):
        raise damaged(source, "its scores are not numbers") from None
    if not np.isfinite(found).all():
        bad = int(np.argmin(np.isfinite(found)))
        raise damaged(source, f"the score of token {bad} is {scores[bad]!r:.60}")
    return found


def _texts(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = items(metadata, "tokens", source)
    if not tokens:
        raise damaged(source, f"it has no tokens ({PREFIX}tokens)")
    for i, text in enumerate(tokens):
        try:
            if type(text) is not str:
                tokens[i] = str(text) if isinstance(text, str) else text.decode()
            elif not text.isascii():
                text.encode()
        except (AttributeError, UnicodeError):
            raise damaged(source, f"token {i} is {text!r:.60}, which is not valid UTF-8") from None
    return tokens


def _types(metadata: Mapping[str, Any], tokens: list[str], source: str) -> list[int]:
    types = items(metadata, "token_type", source)
    if types is None:
        return [BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else NORMAL for text in tokens]
    if len(types) != len(tokens):
        raise damaged(source, f"it has {len(tokens)} tokens but {len(types)} types of tokens")
    known = {0: NORMAL} | {kind: kind for kind in range(NORMAL, BYTE + 1)}
    try:
        return [known[kind] for kind in types]
    except (KeyError, TypeError):
        first = next(i for i, kind in enumerate(types) if not isinstance(kind, int) or kind not in known)
        raise damaged(source, f"token {first} has the type {types[first]!r:.60}, but types are 0 to 6") from None


def _named(metadata: Mapping[str, Any], model: str, types: list[int], source: str) -> dict[str, int]:
    named, untyped = {}, PREFIX + "token_type" not in metadata
    for role, key in _NAMED.items():
        presumed = _PRESUMED.get(model, {}).get(role, -1)
        if metadata.get(PREFIX + key) is not None:
            named[role] = _id(metadata[PREFIX + key], key, len(types), source)
        elif 0 <= presumed < len(types) and (types[presumed] in (CONTROL, UNKNOWN) or untyped):
            named[role] = presumed
    if model == "bert":  # a text begins with [CLS] whichever of the two keys a converter wrote
        named.setdefault("bos", named.get("cls", -1))
    named = {role: token_id for role, token_id in named.items() if token_id >= 0}
    for token_id in named.values():
        if untyped or types[token_id] == UNUSED:
            types[token_id] = CONTROL
    return named


def _id(value: Any, key: str, n: int, source: str) -> int:
    """Return a token id that is inside, or -1 for none."""
    try:
        token_id = index(value)
    except TypeError:
        token_id = n
    if token_id not in NO_TOKEN and not 0 <= token_id < n:
        raise damaged(source, f"{PREFIX}{key} is {value!r:.60}, but its ids are 0 to {n - 1}")
    return -1 if token_id in NO_TOKEN else token_id


def _end_ids(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], ids: Mapping[str, int], source: str
) -> list[int]:
    found = {ids[text] for text in END_TEXTS if text in ids}
    if "</s>" in ids and types[ids["</s>"]] in (CONTROL, USER_DEFINED):  # else it is text, as in HTML
        found.add(ids["</s>"])
    texts = {tokens[i] for i in found}
    if {"<|return|>", "<|call|>"} <= texts or {"<|flush|>", "<|calls|>"} <= texts:
        found.discard(ids.get("<|end|>", -1))  # ends a message there, and others of the same turn follow
    if "<|tool_response>" in texts:
        found.discard(ids.get("</s>", -1))
    for key in END_KEYS:
        value = metadata.get(PREFIX + key)
        many = items(metadata, key, source) if key == "eos_token_ids" else [value]
        found |= {_id(one, key, len(tokens), source) for one in many or [] if one is not None}
    return sorted(found - {-1})
