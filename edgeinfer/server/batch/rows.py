"""The input of a batch: one request on each line, in an order in which common prefixes are neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...base.files import open_plain
from ...base.strict_json import parse_json
from ...base.units import format_size
from ...errors import RequestError, printable

URLS = {"/v1/chat/completions": ("tools", "messages"), "/v1/completions": ("prompt",), "/v1/embeddings": ("input",)}
"""Paths that lines may name, with the fields of the body that are at the beginning of the prompt."""
FIELDS = ("custom_id", "method", "url", "body")
LINE_BYTES = 16 << 20
"""Longest line."""
ID_CHARS = 512
"""Longest custom_id."""
SHOWN = 60
PREFIX_CHARS, KEY_BYTES, KEY_BLOCKS = 64, 4, 4096
"""Characters of a prompt that are one block of its key, about a block of the KV cache; bytes of the block's digest;
most blocks."""


class Row(NamedTuple):
    """A line of the input."""

    number: int
    """Number of the line, from 1."""
    offset: int
    length: int
    custom_id: str
    url: str
    model: str | None
    digest: str
    """Names the request: path and body, without the model."""
    key: bytes
    """Rows whose prompts begin alike have keys that begin alike."""


class Rows:
    """The requests of a file, which is checked as a whole and read again line by line. A context manager.

    Parameters
    ----------
    path : file in OpenAI's batch format
    most : rows at most

    Attributes
    ----------
    all : list of Row
        In the order of their keys.

    Raises
    ------
    RequestError
        It cannot be read, or a line is no request; the sentence has the number of the line.
    """

    def __init__(self, path: str | Path, most: int | None = None):
        self.path = Path(path)
        try:
            self._file = open_plain(self.path)
        except OSError as error:
            raise self._unreadable(error) from None
        try:
            self.all = sorted(self._read(most), key=lambda row: (row.url, row.model or "", row.key, row.number))
        except BaseException:
            self._file.close()
            raise
        if not self.all:
            self._file.close()
            raise RequestError(f"{self.path} has no requests; write one JSON object on each line.")

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def body(self, row: Row) -> bytes:
        """Return the body of a row as JSON; raises `RequestError` if the file has changed."""
        try:
            self._file.seek(row.offset)
            value = parse_json(self._file.read(row.length), unique=True)
            if _row(value, row.number, row.offset, row.length) == row:
                return msgspec.json.encode(value["body"])
        except OSError as error:
            raise self._unreadable(error) from None
        except ValueError:
            pass
        raise RequestError(f"Line {row.number} of {self.path} has changed since it was checked; give a file that "
                           "is not being written.")

    def _read(self, most: int | None) -> Iterator[Row]:
        seen: dict[str, int] = {}
        for number, offset, line in self._lines():
            try:
                row = _row(parse_json(line, unique=True), number, offset, len(line))
                if row.custom_id in seen:
                    raise ValueError(f"has the custom_id of line {seen[row.custom_id]}, {_shown(row.custom_id)}")
            except ValueError as error:
                said = str(error) if str(error).startswith("has ") else f"is not JSON: {error}"
                raise RequestError(f"Line {number} of {self.path} {said}.") from None
            seen[row.custom_id] = number
            if most is not None and len(seen) > most:
                raise RequestError(f"{self.path} has more than {most} requests; divide it.")
            yield row

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, offset and bytes of the lines that are not empty."""
        offset = number = 0
        while True:
            try:
                line = self._file.readline(LINE_BYTES + 1)
            except OSError as error:
                raise self._unreadable(error) from None
            if not line:
                return
            number += 1
            if len(line) > LINE_BYTES:
                raise RequestError(f"Line {number} of {self.path} is longer than {format_size(LINE_BYTES)}, the most "
                                   "that a request may have.")
            if line.strip():
                yield number, offset, line
            offset += len(line)

    def _unreadable(self, error: OSError) -> RequestError:
        return RequestError(f"Cannot read {self.path}: {error.strerror or error}.")


def _row(value: Any, number: int, offset: int, length: int) -> Row:
    """Return the row of a line's value; raises ValueError with the wrong or missing field."""
    if not isinstance(value, dict):
        raise ValueError(f"has {_shown(value)}, and a request is an object")
    for name in FIELDS:
        if name not in value:
            raise ValueError(f"has no {name}; a request has {', '.join(FIELDS)}")
    if further := next((name for name in value if name not in FIELDS), None):
        raise ValueError(f"has the field {_shown(further)}; a request has {', '.join(FIELDS)}")
    custom_id, body, url = value["custom_id"], value["body"], value["url"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= ID_CHARS:
        raise ValueError(f"has the custom_id {_shown(custom_id)}; it is a text of 1 to {ID_CHARS} characters")
    if value["method"] != "POST":
        raise ValueError(f"has the method {_shown(value['method'])}; it is POST")
    if not isinstance(url, str) or url not in URLS:
        raise ValueError(f"has the url {_shown(url)}; it is one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"has the body {_shown(body)}; it is an object")
    if body.get("stream"):
        raise ValueError("has stream in its body; the answers of a batch are whole, so leave it out")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"has the model {_shown(model)}; it is a text")
    about = msgspec.json.encode([custom_id, url, {name: one for name, one in body.items() if name != "model"}])
    return Row(number, offset, length, custom_id, url, model, hashlib.sha256(about).hexdigest()[:24], _key(body, url))


def _key(body: dict[str, Any], url: str) -> bytes:
    """Return the digests of the blocks of a prompt."""
    text = b"".join(msgspec.json.encode(body[name]) for name in URLS[url] if name in body)
    blocks = (text[at:at + PREFIX_CHARS] for at in range(0, min(len(text), PREFIX_CHARS * KEY_BLOCKS), PREFIX_CHARS))
    return b"".join(hashlib.blake2b(one, digest_size=KEY_BYTES).digest() for one in blocks)


def _shown(value: Any) -> str:
    text = printable(value if isinstance(value, str) else msgspec.json.encode(value).decode())
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...") if isinstance(value, str) else text[:SHOWN]
