"""Tokenizers of the `sentencepiece` library: tokenizer.model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .cuts import between_pairs
from .fast import added_tokens
from .files import REMEDY, read_bytes, read_optional_object
from .libraries import library_errors
from .long_texts import Cuts, check_wanted, parts
from .pieces import SPACE_MARK, PieceRules

_WITHOUT_PREFIX = b"\x1a\x02\x18\x00"
"""A protobuf message may be continued by appending: normalizer_spec (field 3) { add_dummy_prefix (field 3): false }."""

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


_BPE = 2
_KIND, _FALLBACK = (2, 3), (2, 35)
_REPLACEMENTS, _EXTRA_SPACES, _ESCAPED = (3, 2), (3, 4), (3, 5)
"""Fields of trainer_spec (2) and normalizer_spec (3): model_type (unigram by default), byte_fallback, and the bytes of
precompiled_charsmap, remove_extra_whitespaces and escape_whitespaces (both true by default)."""


class SentencePieceTokenizer:
    """One backend of `Tokenizer`; wraps ``sentencepiece.SentencePieceProcessor``.

    Control pieces (``<s>``) are text for SentencePiece itself; here they are cut out of the text beforehand where
    the caller asks for it, as are the tokens that a checkpoint adds in tokenizer_config.json or added_tokens.json.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self._model = read_bytes(path)
        self._path = path
        self._processor = self._load(self._model)
        self._processor_without_prefix: Any = None
        self._n_pieces = self._processor.get_piece_size()
        self._added = added_tokens(settings, path.with_name("tokenizer_config.json")) | self._older_added_tokens()
        self.vocab_size = max([self._n_pieces, *(token_id + 1 for token_id in self._added)])
        control = [i for i in range(self._n_pieces) if self._processor.is_control(i) or self._processor.is_unknown(i)]
        special = [token_id for token_id, token in self._added.items() if token.get("special") is True]
        self.special_ids = frozenset(control + special)
        self._ids = {self._processor.id_to_piece(i): i for i in control if not self._processor.is_unknown(i)}
        self._ids |= {token["content"]: token_id for token_id, token in self._added.items()}
        self._cut = _pattern(self._ids)
        self._cut_plain = _pattern([text for text, i in self._ids.items() if i not in self.special_ids])
        # The original Llama code (``legacy``, the default) puts a space before the text after a special token too.
        self._prefix_after_special = settings.get("legacy") is not False
        has_prefix = self._processor.encode_as_pieces("a")[0].startswith(SPACE_MARK)
        self.rules = PieceRules(replacements=((SPACE_MARK, " "),), n_leading_spaces=int(has_prefix))
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self._cuts: Cuts | None = None
        self._cuts_known = False

    def _load(self, model: bytes) -> Any:
        if not model:
            raise TokenizerError(f"{self._path} is empty; {REMEDY}.")
        if _TIKTOKEN_LINE.match(model):
            raise TokenizerError(
                f"{self._path} holds tiktoken ranks, not a SentencePiece model; put the tokenizer.json of the same "
                "checkpoint beside it."
            )
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=model)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TokenizerError(f"{self._path} is not a SentencePiece model; {REMEDY}.") from error

    def _older_added_tokens(self) -> dict[int, dict[str, Any]]:
        """Read added_tokens.json (text -> id), which older checkpoints have beside tokenizer.model."""
        path = self._path.with_name("added_tokens.json")
        table = read_optional_object(path)
        for text, token_id in table.items():
            if type(token_id) is not int or token_id < 0 or not text:
                raise TokenizerError(f"{path} gives token {text!r} the id {token_id!r}; {REMEDY}.")
        return {token_id: {"content": text} for text, token_id in table.items() if token_id >= self._n_pieces}

    def prefix_ids(self) -> list[int]:
        """Return the tokens before every text: the model's beginning-of-text token, if it has one."""
        return [] if self.bos_id is None else [self.bos_id]

    def encode(
        self, text: str, parse_special: bool, most: int | None = None, stopped: Callable[[], bool] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of the text, without any added in front; the rest is left out once there are over `most`."""
        cut = self._cut if parse_special else self._cut_plain
        parts = cut.split(text) if cut else [text]
        ids: list[int] = []
        for i, part in enumerate(parts):  # odd parts are tokens cut out, even ones the text between
            check_wanted(stopped)
            if most is not None and len(ids) > most:
                break
            if i % 2:
                ids.append(self._ids[part])
                continue
            token = self._added.get(ids[-1], {}) if ids else {}
            part = part.lstrip() if token.get("rstrip") is True else part
            if part:
                with library_errors(self._path):
                    begins = i == 0 or (not parts[0] and i == 2)
                    prefixed = not continues if i == 0 else begins or self._prefix_after_special
                    ids += self._with_prefix(prefixed).encode(part)
        return ids

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of a text that arrives in pieces, part by part; all at once if it cannot be cut."""
        if not self._cuts_known:
            self._cuts, self._cuts_known = self._find_cuts(), True
        if self._cuts is None:
            yield self.encode("".join(pieces), False)
            return
        for i, part in enumerate(parts(pieces, self._cuts)):
            yield self.encode(part, False, continues=i > 0)

    def _find_cuts(self) -> Cuts | None:
        """Return where texts may be cut: where BPE without replacements in the text cannot merge across."""
        own, pieces = self._processor, range(self._n_pieces)
        settings = _settings(self._model)
        if settings.get(_KIND) != _BPE or settings.get(_REPLACEMENTS) or settings.get(_EXTRA_SPACES, 1) \
                or not settings.get(_ESCAPED, 1) or any(map(own.is_unused, pieces)):
            return None
        texts = [own.id_to_piece(i) for i in pieces if not (own.is_control(i) or own.is_unknown(i) or own.is_byte(i))]
        added = [text for text, token_id in self._ids.items() if token_id not in self.special_ids]
        strips = any(token.get("rstrip") is True for token in self._added.values())
        return between_pairs(texts, bool(settings.get(_FALLBACK)), added, strips)

    def _with_prefix(self, prefixed: bool) -> Any:
        if prefixed or not self.rules.n_leading_spaces:
            return self._processor
        if self._processor_without_prefix is None:
            self._processor_without_prefix = self._load(self._model + _WITHOUT_PREFIX)
        return self._processor_without_prefix

    def token_id(self, content: str) -> int | None:
        """Return the id of the token with this text, or None."""
        if content in self._ids:
            return self._ids[content]
        token_id = self._processor.piece_to_id(content)
        return token_id if self._processor.id_to_piece(token_id) == content else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for; nothing for an id without a token."""
        if token_id in self._added:
            return self._added[token_id]["content"].encode("utf-8")
        if token_id >= self._n_pieces or self._processor.is_unused(token_id):
            return b""
        piece = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return self.rules.to_bytes(piece)

    def content(self) -> dict[str, Any]:
        """Return all that the ids of a text depend on."""
        own, pieces = self._processor, range(self._n_pieces)
        kinds = (own.is_control, own.is_unknown, own.is_unused, own.is_byte)
        return {
            "pieces": {i: own.id_to_piece(i) for i in pieces}, "added tokens": self._added,
            "kinds of pieces": {i: [kind(i) for kind in kinds] for i in pieces},
            "scores": {i: own.get_score(i) for i in pieces},
            "spaces after special tokens": self._prefix_after_special,
        }


def _settings(model: bytes) -> dict[tuple[int, int], int]:
    """Return the numbers, and the lengths of the texts, in the two messages of a model that hold its settings."""
    found: dict[tuple[int, int], int] = {}
    for message, start, length in _fields(model, 0, len(model)):
        if message in (2, 3) and start >= 0:
            found |= {(message, field): length for field, _, length in _fields(model, start, start + length)}
    return found


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield a protobuf message's fields: offset and length, or -1 and the number (0 for a float)."""
    while at < end:
        key, at = _varint(data, at)
        if key & 7 == 2:
            length, at = _varint(data, at)
            yield key >> 3, at, length
            at += length
        elif key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, -1, value
        else:
            yield key >> 3, -1, 0
            at += 8 if key & 7 == 1 else 4


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def open_tokenizer_model(path: Path, settings: Mapping[str, Any]) -> SentencePieceTokenizer:
    """Open a tokenizer.model with the settings of tokenizer_config.json; raises `TokenizerError`."""
    with library_errors(path):
        return SentencePieceTokenizer(path, settings)


def _pattern(texts: Any) -> re.Pattern[str] | None:
    """Return a pattern that cuts out any of these texts, the longest first; None for no texts."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
