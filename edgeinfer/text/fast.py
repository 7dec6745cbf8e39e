"""Tokenizers of the `tokenizers` library: tokenizer.json, or vocab.json with merges.txt (Qwen2, GPT-2)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .files import REMEDY, read_bytes, read_object, read_text
from .libraries import library_errors
from .long_texts import PART, WHITE, Cuts, check_wanted, interruptible, parts
from .pieces import rules_of_decoder

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pattern for splitting text into words."""
GAP = 4096
"""Ids in a row without a token, after which no further ones are expected."""


class FastTokenizer:
    """One backend of `Tokenizer`; wraps ``tokenizers.Tokenizer``."""

    def __init__(self, tokenizer: Any, source: Path, renamed: Mapping[int, int] | None = None):
        # Files made for training may cut or pad every text; a prompt must arrive whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._source = source
        self._renamed = renamed or {}
        self._begin_users()
        self._parse_special = True
        self._continuing: FastTokenizer | None = None
        self._borders: frozenset[int] = frozenset()
        tokenizer.encode_special_tokens = False
        self._cuts: dict[bool, Cuts | None] = {}
        decoder = tokenizer.decoder
        self.rules = rules_of_decoder(json.loads(decoder.__getstate__()) if decoder else None, str(source))
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._strips = frozenset(token_id for token_id, token in added.items() if token.lstrip)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = _highest_id(tokenizer, max([tokenizer.get_vocab_size(), *(i + 1 for i in added)]) - 1) + 1
        self.bos_id: int | None = None
        self.eos_id: int | None = None

    def _begin_users(self) -> None:
        self._switch, self._users, self._process = threading.Condition(), 0, os.getpid()

    def prefix_ids(self) -> list[int]:
        """Return the ids that the file's post-processor puts before every text."""
        probe = "a"
        with library_errors(self._source):
            plain = self._tokenizer.encode(probe, add_special_tokens=False).ids
            full = self._tokenizer.encode(probe).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def encode(
        self, text: str, parse_special: bool, most: int | None = None, stopped: Callable[[], bool] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of the text, without any added in front; the rest is left out once there are over `most`."""
        if continues:
            return self._encode_continuation(text, parse_special, most, stopped)
        if len(text) <= PART:
            return self._encode(text, parse_special, stopped)
        ids: list[int] = []
        for some in self.encode_pieces([text], parse_special, stopped):
            ids += some
            if most is not None and len(ids) > most:
                break
        return ids

    def _encode_continuation(self, text: str, parse_special: bool, most: int | None,
                             stopped: Callable[[], bool] | None) -> list[int]:
        """Encode text that continues other text; after some added tokens a space is inserted if the file says so."""
        other = self._without_space()
        if other is self:
            return self.encode(text, parse_special, most, stopped)
        if not any(content in text for content in self._added.values()):
            return other.encode(text, parse_special, most, stopped)
        found = interruptible(partial(other._encoding, text, parse_special, stopped), stopped)
        ids = other._ids(found)
        for n, (token_id, (start, _)) in enumerate(zip(ids, found.offsets, strict=True)):
            if token_id in self._borders and self._added[token_id] in text:
                tail = self.encode(text[start:], parse_special, most, stopped)
                if token_id in tail:
                    return ids[:n] + tail[tail.index(token_id) :]
        return ids

    def _encode_continued_part(self, text: str, parse_special: bool, stopped: Callable[[], bool] | None) -> list[int]:
        """Encode a part that no added token is at the border of, nor looked for in text that a normaliser changed."""
        end = self._first_added(text, parse_special)
        ids = self._without_space()._encode(text[:end], parse_special, stopped)
        return ids + self._encode(text[end:], parse_special, stopped) if end < len(text) else ids

    def _first_added(self, text: str, parse_special: bool) -> int:
        """Return where the first added token is that splits the text, with the spaces that it takes; else the end."""
        found = ((text.find(one), i in self._strips) for i, one in self._added.items()
                 if parse_special or i not in self.special_ids)
        return min((len(text[:at].rstrip(WHITE)) if strips else at for at, strips in found if at >= 0),
                   default=len(text))

    def _without_space(self) -> FastTokenizer:
        if self._continuing is None:
            from .continuation import without_leading_space

            found = without_leading_space(self._tokenizer)
            self._borders = found.borders if found else frozenset()
            self._continuing = FastTokenizer(found.tokenizer, self._source, found.ids) if found else self
        return self._continuing

    def encode_pieces(self, pieces: Iterable[str], parse_special: bool = False,
                      stopped: Callable[[], bool] | None = None) -> Iterator[list[int]]:
        """Yield the ids of a text that arrives in pieces, part by part; all at once if it cannot be cut."""
        if parse_special not in self._cuts:
            from .cuts import cuts_of

            self._cuts[parse_special] = cuts_of(self._tokenizer, parse_special)
        cuts = self._cuts[parse_special]
        encode = self._encode
        for part in ["".join(pieces)] if cuts is None else parts(pieces, cuts):
            long = len(part) > 2 * PART
            yield interruptible(partial(encode, part, parse_special, stopped), stopped) if long else \
                encode(part, parse_special, stopped)
            check_wanted(stopped)
            if cuts is not None and cuts.continues:
                encode = self._encode_continued_part

    def _encode(self, text: str, parse_special: bool, stopped: Callable[[], bool] | None) -> list[int]:
        return self._ids(self._encoding(text, parse_special, stopped))

    def _ids(self, encoding: Any) -> list[int]:
        ids: list[int] = encoding.ids
        return [self._renamed.get(token_id, token_id) for token_id in ids] if self._renamed else ids

    def _encoding(self, text: str, parse_special: bool, stopped: Callable[[], bool] | None) -> Any:
        with self._set_to(parse_special, stopped), library_errors(self._source):
            return self._tokenizer.encode(text, add_special_tokens=False)

    @contextmanager
    def _set_to(self, parse_special: bool, stopped: Callable[[], bool] | None) -> Iterator[None]:
        """Have the library's switch, which it keeps in the tokenizer, stay so meanwhile.

        Threads do not wait for each other: one may still be busy with a long text that was abandoned.
        """
        if self._process != os.getpid():  # forked: the parent's user does not exist here
            self._begin_users()
        with self._switch:
            while not self._switch.wait_for(lambda: not self._users or self._parse_special == parse_special, 0.05):
                check_wanted(stopped)
            if self._parse_special != parse_special:
                self._tokenizer.encode_special_tokens = not parse_special
                self._parse_special = parse_special
            self._users += 1
        try:
            yield
        finally:
            with self._switch:
                self._users -= 1
                self._switch.notify_all()

    def token_id(self, content: str) -> int | None:
        """Return the id of the token with this text, or None."""
        return self._tokenizer.token_to_id(content)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for; nothing for an id without a token."""
        if self.rules.byte_level and token_id in self._added:
            return self._added[token_id].encode("utf-8")
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self.rules.to_bytes(piece)

    def content(self) -> dict[str, Any]:
        """Return all that the ids of a text depend on; the decoder, and tokens around a text, do not belong to it."""
        data = json.loads(self._tokenizer.to_str())
        model = data["model"]
        vocab, merges = model.pop("vocab", {}), model.pop("merges", [])
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        added = {token.pop("id"): token for token in data["added_tokens"]}
        return {
            "tokens": dict(sorted((i, piece) for piece, i in pairs)), "added tokens": dict(sorted(added.items())),
            "merges": dict(enumerate(merges)), "scores": None if isinstance(vocab, dict) else vocab,
            "normalisers": data["normalizer"], "pre-tokenisers": data["pre_tokenizer"],
            "other settings": json.dumps(model, sort_keys=True),
        }


def _highest_id(tokenizer: Any, start: int) -> int:
    """Return the highest id that has a token: ids may have gaps, so that it is above the number of tokens.

    Listing all tokens takes some tenths of a second, so looking ends where none follows within `GAP` ids.
    """
    while (following := [i for i in range(start + 1, start + GAP) if tokenizer.id_to_token(i) is not None]):
        start = following[-1]
    return start


def open_tokenizer_json(path: Path) -> FastTokenizer:
    """Open a tokenizer.json.

    Raises `TokenizerError`: the file is missing, too large, damaged, or decodes in a way that cannot be streamed.
    """
    data = read_bytes(path)
    from tokenizers import Tokenizer

    with library_errors(path):
        return FastTokenizer(Tokenizer.from_buffer(data), path)


def open_vocab_and_merges(directory: Path, settings: Mapping[str, Any]) -> FastTokenizer:
    """Build a byte-level BPE tokenizer from vocab.json and merges.txt.

    `settings` (tokenizer_config.json) must name the tokenizer's class: the two files alone do not say how text is
    cut into words.
    """
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        raise TokenizerError(
            f"{directory} holds vocab.json and merges.txt, but its tokenizer_config.json names the tokenizer_class "
            f"{kind!r}; only Qwen2Tokenizer and GPT2Tokenizer can be built from these, others need a tokenizer.json."
        )
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab_path = directory / "vocab.json"
    vocab, merges = read_object(vocab_path), _read_merges(directory / "merges.txt")
    with library_errors(vocab_path):
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if kind == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        prefix_space = settings.get("add_prefix_space") is True
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    for token_id, token in added_tokens(settings, directory / "tokenizer_config.json").items():
        content, special = token["content"], token.get("special") is True
        known = tokenizer.token_to_id(content)
        flags = {name: token.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
        tokenizer.add_tokens([AddedToken(content, special=special, normalized=False, **flags)])
        if special:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False, **flags)])
        if known is None and tokenizer.token_to_id(content) != token_id:
            raise TokenizerError(
                f"{directory / 'tokenizer_config.json'} gives token {content!r} the id {token_id}, but vocab.json "
                f"leaves {tokenizer.token_to_id(content)} for it; {REMEDY}."
            )
    return FastTokenizer(tokenizer, directory)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    lines = read_text(path).split("\n")
    if lines[0].startswith("#version"):
        lines = lines[1:]
    merges = []
    for line in lines:
        if not line.strip("\r"):
            continue
        parts = line.strip("\r").split(" ")
        if len(parts) != 2:
            raise TokenizerError(f"{path} has the line {line[:80]!r}, which is not a pair of tokens; {REMEDY}.")
        merges.append((parts[0], parts[1]))
    return merges


def added_tokens(settings: Mapping[str, Any], source: Path) -> dict[int, dict[str, Any]]:
    """Return ``added_tokens_decoder`` of tokenizer_config.json by id, in the order of the ids."""
    table = settings.get("added_tokens_decoder") or {}
    try:
        added = {int(token_id): dict(token) for token_id, token in table.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError(f"{source}: added_tokens_decoder is not a table of tokens by id; {REMEDY}.") from error
    for token_id, token in added.items():
        if not isinstance(token.get("content"), str) or not token["content"] or token_id < 0:
            raise TokenizerError(f"{source}: added token {token_id} has no text; {REMEDY}.")
    return dict(sorted(added.items()))
