"""Bounded reading of tokenizer files: sizes are checked before bytes are read, and JSON must be an object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.files import open_plain
from ..base.strict_json import parse_json
from ..errors import TokenizerError

MAX_FILE_BYTES = 512_000_000
"""Far above the largest tokenizer in use (tens of megabytes), far below a size that would hurt a small machine for
long."""

REMEDY = "copy or download it again"


def read_bytes(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the file's bytes.

    Raises `TokenizerError`: the file cannot be read, is not a plain file, or is larger than `limit_bytes`.
    """
    try:
        if not path.is_file():
            raise TokenizerError(f"{path} is not a file; {REMEDY}.")
        with open_plain(path) as file:
            data = file.read(min(path.stat().st_size, limit_bytes) + 1)  # one more shows a file that grew or lied
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read ({error.strerror}); {REMEDY}.") from error
    if len(data) > limit_bytes:
        raise TokenizerError(f"{path} is larger than the limit of {limit_bytes} bytes; {REMEDY}.")
    return data


def read_text(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the file's text (UTF-8); raises `TokenizerError` as `read_bytes`, and for other encodings."""
    try:
        return read_bytes(path, limit_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text (byte {error.start}); {REMEDY}.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; raises `TokenizerError` for damage and for any other JSON value."""
    text = read_text(path)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON ({error}); {REMEDY}.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a JSON {type(value).__name__}, not an object; {REMEDY}.")
    return value


def read_optional_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file, or an empty one if there is no such file."""
    return read_object(path) if path.exists() else {}


def token_content(settings: Mapping[str, Any], key: str) -> str | None:
    """Return the text of the special token `key` (``bos_token``, ...): a string or an object with ``content``."""
    value = settings.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
