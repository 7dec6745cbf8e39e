"""The tokenizer of a model that need not be converted yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle import Bundle, is_bundle

if TYPE_CHECKING:
    from ..text import Tokenizer


def tokenizer_of(path: Path) -> Tokenizer | None:
    """Return the tokenizer with which a bundle, a checkpoint or a GGUF file runs; None if it has none.

    Raises
    ------
    CheckpointError, TokenizerError, BundleError
        A run could not open it either.
    """
    from ..text import TOKENIZER_FILES, Tokenizer

    if is_bundle(path):
        with Bundle.open(path) as bundle:
            return Tokenizer.of_model(bundle.path, bundle.files, bundle.config)
    if path.is_dir():
        from edgeinfer.converters import open_checkpoint

        with open_checkpoint(path) as checkpoint:
            checkpoint.check_travelling_files()
            return Tokenizer.open(path) if checkpoint.travelling_files.keys() & set(TOKENIZER_FILES) else None
    from tempfile import TemporaryDirectory

    from edgeinfer.converters import read_gguf_tokenizer, read_headers

    made = read_gguf_tokenizer(read_headers(path)[0].fields, str(path))
    if made is None:
        return None
    with TemporaryDirectory() as folder:
        for name, content in made.files.items():
            Path(folder, name).write_bytes(content)
        return Tokenizer.open(folder)
