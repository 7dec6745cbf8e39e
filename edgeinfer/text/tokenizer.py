"""The tokenizer of a model: text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, TokenizerError
from .backend import Backend, open_backend
from .chat import template_files
from .files import REMEDY, read_optional_object, token_content
from .libraries import held_back_stderr
from .stream import StreamDecoder

if TYPE_CHECKING:
    from ..graph import ModelConfig

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Any of these makes a tokenizer."""
READ = (*FILES, "merges.txt", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json",
        "generation_config.json")
"""All that is read of a bundle's texts, beside its chat templates."""
PROBES = ("Once upon a time", "3 crows,\n\tein \u00fcbler Fuchs", "\u4e2d\u6587", "\U0001f98a", " ", "\0\x01")
"""Texts that every tokenizer must take: words, digits, spaces, characters of one to four bytes, and control ones."""
_SHRINKING = 4
"""Most bytes of text that a normaliser makes one of."""


class Tokenizer:
    """Encodes and decodes text as the checkpoint's tokenizer files say; safe to share between threads.

    Attributes
    ----------
    vocab_size : highest token id + 1; a model's vocabulary may be padded beyond it
    bos_id : beginning-of-text token, or None
    eos_ids : all tokens that end a text: generation_config.json, tokenizer_config.json, special_tokens_map.json,
        the model's own settings if handed over, and tokenizer.model
    """

    def __init__(self, backend: Backend, settings: list[tuple[Path, Mapping[str, Any]]]):
        self._backend = backend
        self.vocab_size = backend.vocab_size
        self._longest: int | None = None
        named = [(path, "bos_token", values) for path, values in settings]
        self.bos_id: int | None = next((i for i in map(self._named_id, named) if i is not None), backend.bos_id)
        if self.bos_id is None:
            ids = [i for path, values in settings for i in _ids(values, "bos_token_id", path)]
            self.bos_id = ids[0] if ids else None
        self.eos_ids = self._find_eos_ids(settings)
        self._prefix = self._find_prefix(settings)
        self._plain_bytes = lru_cache(maxsize=None)(self._bytes)  # bounded by the vocabulary

    @classmethod
    def of_model(cls, directory: Path, names: Collection[str], model: ModelConfig) -> Tokenizer | None:
        """Open the tokenizer of a bundle as running does, None if no file of that `names` makes one.

        Raises `TokenizerError` as `open`.
        """
        read = [*READ, *(path.relative_to(directory).as_posix() for path in template_files(directory).values())]
        if strays := [name for name in read if name not in names and (directory / name).exists()]:
            raise TokenizerError(f"{directory} holds {strays[0]}, which the bundle does not list and no checksum "
                                 "covers; remove it, or convert the model again with it.")
        if not any(name in names for name in FILES):
            return None
        ids = {"eos_token_id": list(model.eos_token_ids), "bos_token_id": model.bos_token_id}
        return cls.open(directory, ids)

    @classmethod
    def open(cls, directory: Path | str, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """Open the tokenizer files of a bundle or checkpoint directory.

        Parameters
        ----------
        directory : holds tokenizer.json, or tokenizer.model, or vocab.json with merges.txt, and beside it any of
            tokenizer_config.json, generation_config.json, special_tokens_map.json
        config : the model's own settings (config.json), for its end-of-text ids

        Raises
        ------
        TokenizerError
            No tokenizer is there, or a file is damaged; the message names the file and the remedy.
        """
        directory = Path(directory)
        paths = [directory / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map", "generation_config")]
        settings: list[tuple[Path, Mapping[str, Any]]] = [(path, read_optional_object(path)) for path in paths]
        with held_back_stderr():
            backend = open_backend(directory, settings[0][1])
            tokenizer = cls(backend, [*settings, (directory / "config.json", config or {})])
            for text in PROBES:  # an error with such a text is a fault of the file, not of a prompt
                tokenizer.decode(tokenizer.encode(text, parse_special=True))
        return tokenizer

    def _named_id(self, named: tuple[Path, str, Mapping[str, Any]]) -> int | None:
        path, key, values = named
        content = token_content(values, key)
        if content is None:
            return None
        token_id = self._backend.token_id(content)
        if token_id is None:
            raise TokenizerError(f"{path} names the {key} {content!r}, which the tokenizer does not have; {REMEDY}.")
        return token_id

    def _find_eos_ids(self, settings: list[tuple[Path, Mapping[str, Any]]]) -> frozenset[int]:
        found = {i for path, values in settings for i in _ids(values, "eos_token_id", path)}
        found |= {i for path, values in settings if (i := self._named_id((path, "eos_token", values))) is not None}
        if self._backend.eos_id is not None:
            found.add(self._backend.eos_id)
        return frozenset(found)

    def _find_prefix(self, settings: list[tuple[Path, Mapping[str, Any]]]) -> list[int]:
        """Return the tokens before a text by default: tokenizer_config.json decides, else the tokenizer itself."""
        add_bos = settings[0][1].get("add_bos_token")
        if add_bos is False:
            return []
        prefix = self._backend.prefix_ids()
        return [self.bos_id] if add_bos is True and not prefix and self.bos_id is not None else prefix

    def difference(self, other: Tokenizer) -> str:
        """Describe the difference between two tokenizers, by content; empty if the same text has the same ids in both.

        Files of different kinds are compared by their tokens, and by the ids that they give to a few texts.
        """
        parts, others = self._backend.content(), other._backend.content()
        if parts.keys() != others.keys():
            n = max(self.vocab_size, other.vocab_size)
            parts, others = ({"tokens": {i: one._bytes(i) for i in range(n)},
                              "special tokens": dict.fromkeys(sorted(one._backend.special_ids), True)}
                             for one in (self, other))
        for name, part in parts.items():
            if part != others[name]:
                return _first_difference(name, part, others[name])
        texts, other_texts = ({text: one._backend.encode(text, True) for text in PROBES} for one in (self, other))
        return "" if texts == other_texts else _first_difference("ids of texts", texts, other_texts)

    def bytes_per_token(self) -> int:
        """Return the largest number of bytes of text in one token: a longer text has more than one.

        A normaliser may make text shorter: composing (NFC) to a third, compatibility forms (NFKC) to a quarter, which
        is assumed of all. Normalisers that drop text altogether are not trusted beyond that.
        """
        if self._longest is None:
            self._longest = max((len(self._bytes(token_id)) for token_id in range(self.vocab_size)), default=1)
        return _SHRINKING * max(self._longest, 1)

    def encode(
        self, text: str, add_bos: bool | None = None, parse_special: bool = False, most: int | None = None,
        stopped: Callable[[], bool] | None = None, leading_space: bool | None = None,
    ) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        add_bos : put the beginning-of-text token in front; None does as the tokenizer files say. It is never
            doubled: a text that already begins with it (a chat template wrote it) gets no second one. With False the
            text continues another one, so that ``[*encode("It is"), *encode(" good", add_bos=False)]`` is one text.
        parse_special : turn special tokens written in the text (``<|im_end|>``) into their ids, as the output of a
            chat template needs; else they are ordinary text, so that they cannot be injected.
        most : stop reading once there are more tokens than this; the result is then longer than `most`
        stopped : asked all the while; True ends the work with a `CancelledError`
        leading_space : put the space before the text that some tokenizers (Llama 2's) put where a text begins; by
            default they do unless `add_bos` is False. Others put none, whatever this says.

        Raises
        ------
        RequestError
            The text is not a string or holds half of a surrogate pair.
        TokenizerError
            `add_bos` is True and the tokenizer has no such token.
        """
        if not isinstance(text, str):
            raise RequestError(f"The text is a {type(text).__name__}; it must be a string.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text holds half of a surrogate pair (U+{ord(text[error.start]):04X} at character "
                f"{error.start}), which no encoding has; remove it."
            ) from error
        continues = add_bos is False if leading_space is None else not leading_space
        ids = self._backend.encode(text, parse_special, most, stopped, continues)
        prefix = self._prefix if add_bos is None else self._wanted_prefix(add_bos)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of a text that comes in pieces, in runs: together those of `encode` without anything in front.

        Where the text can be cut without changing its ids, no more of it is held than a few pieces.
        """
        return self._backend.encode_pieces(pieces)

    def _wanted_prefix(self, add_bos: bool) -> list[int]:
        if not add_bos:
            return []
        if not self._prefix and self.bos_id is None:
            raise TokenizerError("This tokenizer has no beginning-of-text token; leave add_bos out.")
        return self._prefix or [self.bos_id or 0]

    def _bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            raise RequestError(f"Token id {token_id} is negative; ids are from 0 to {self.vocab_size - 1}.")
        return self._backend.token_bytes(int(token_id)) if token_id < self.vocab_size else b""

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._backend.special_ids else self._plain_bytes(token_id)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of these ids.

        The space that the tokenizer put before the text is taken away; special tokens are left out unless
        `skip_special` is False; invalid bytes become U+FFFD; ids above the vocabulary (padding rows of the model)
        stand for nothing.

        Raises
        ------
        RequestError
            An id is negative.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(int(token_id)) for token_id in ids]) + stream.flush()

    def stream(self, prompt_ids: Items[int] = (), skip_special: bool = True) -> StreamDecoder:
        """Return a decoder that takes ids one by one; `prompt_ids` are before them and yield no text."""
        token_bytes = self._visible_bytes if skip_special else self._plain_bytes
        return StreamDecoder(token_bytes, self._backend.rules.n_leading_spaces, prompt_ids)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text, such as those that end one."""
        return self._backend.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token as it is in a text; those of special tokens are their names."""
        return self._plain_bytes(int(token_id))

    def token_text(self, token_id: int) -> str:
        """Return one token as text, special tokens too; bytes that are not a whole character show as U+FFFD."""
        return self._plain_bytes(int(token_id)).decode("utf-8", "replace")


def _first_difference(name: str, one: Any, other: Any) -> str:
    """Describe where two parts of tokenizers differ; of tables the first entry."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return f"their {name} differ"
    key = next(key for key in (*one, *other) if one.get(key) != other.get(key))
    values = (f"{table[key]!r:.60}" if key in table else "missing" for table in (one, other))
    return f"of their {name}, {key!r:.40} is {' in the one and '.join(values)} in the other"


def _ids(values: Mapping[str, Any], key: str, path: Path) -> list[int]:
    """Return the token ids under `key`: one, a list, or none."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError(f"{path}: {key} holds {token_id!r}, which is not a token id; {REMEDY}.")
    return ids
