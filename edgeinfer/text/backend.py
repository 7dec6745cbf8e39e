"""Interface of tokenizer libraries, and the choice of one by the files of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import TokenizerError
from .pieces import PieceRules


class Backend(Protocol):
    """Interface that `Tokenizer` requires of a tokenizer library."""

    vocab_size: int
    special_ids: frozenset[int]
    rules: PieceRules
    bos_id: int | None
    eos_id: int | None

    def prefix_ids(self) -> list[int]:
        """Return the ids that are before every text."""

    def encode(
        self, text: str, parse_special: bool, most: int | None = None, stopped: Callable[[], bool] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of the text, without any added in front; the rest is left out once there are over `most`.

        Where the text `continues` another one, it gets none of the spaces that a tokenizer puts before a text.
        """

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of a text that arrives in pieces; special tokens in it are ordinary text."""

    def token_id(self, content: str) -> int | None:
        """Return the id of the token with this text, or None."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id without a token."""

    def content(self) -> dict[str, Any]:
        """Return all that the ids of a text depend on, by the names of the parts; tables by id, as dictionaries."""


def open_backend(directory: Path, settings: Mapping[str, Any]) -> Backend:
    """Open the tokenizer of a directory with the library that reads its files."""
    # tokenizer.json goes first where both exist: the checkpoint's users run it, and it alone holds the tokens
    # and the post-processor that fine-tuning added. Both agree token by token where tokenizer.json was converted with
    # its normaliser (Llama 2, the fables models); where it was made differently, the ids of other runtimes
    # that read tokenizer.json are the ones to match.
    if (directory / "tokenizer.json").exists():
        from .fast import open_tokenizer_json

        return open_tokenizer_json(directory / "tokenizer.json")
    if (directory / "tokenizer.model").exists():
        from .spm import open_tokenizer_model

        return open_tokenizer_model(directory / "tokenizer.model", settings)
    if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
        from .fast import open_vocab_and_merges

        return open_vocab_and_merges(directory, settings)
    raise TokenizerError(
        f"{directory} holds no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt); put the "
        "checkpoint's tokenizer files there."
    )
