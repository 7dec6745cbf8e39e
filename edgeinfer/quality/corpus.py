"""A text as a stream of tokens: read a piece at a time, cut into documents, tokenised, and kept outside of memory.

The protocol: documents are tokenised one by one, each begins with the beginning-of-text token if the model has one, and
all of them make one stream.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import math
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..base.dataclass import dataclass
from ..base.validation import TEXT, checked, instance, integer
from ..errors import EdgeInferError

if TYPE_CHECKING:
    from ..text import Tokenizer

SEPARATOR = "\f"
"""Default separator of the documents of a text."""
MAX_BYTES, SPARE_BYTES = 64 << 20, 1 << 16
"""Longest text, and the part read beyond the bytes that surely hold the tokens, so that none is cut."""
READ_BYTES = 1 << 16
"""Read at a time."""
BLOCK_TOKENS = 1 << 13
"""Tokens looked at together where a whole stream is gone through."""
LINE_ENDS = {"\r": "CR", "\r\n": "CR LF"}
_SOME = integer(1, math.inf, "1 or more")


@dataclass(frozen=True)
class Stream:
    """The tokens of all documents in a row."""

    ids: Sequence[int]
    counted: Sequence[bool]
    """True if a token is to be predicted: all but the beginnings of documents."""
    text_bytes: int
    """UTF-8 bytes of the counted tokens' text."""
    name: str = ""
    """Name of the text, for messages."""

    def sha256(self) -> str:
        """Return the checksum of the token ids, as JSON."""
        digest = hashlib.sha256(b"[")
        for start in range(0, len(self.ids), BLOCK_TOKENS):
            some = ", ".join(map(str, self.ids[start : start + BLOCK_TOKENS]))
            digest.update(f"{', ' if start else ''}{some}".encode())
        digest.update(b"]")
        return digest.hexdigest()


def token_stream(
    tokenizer: Tokenizer, text: str, separator: str | None = None, max_tokens: int | None = None, name: str = ""
) -> Stream:
    """Tokenise the documents of a text; line breaks at their ends are left out.

    Parameters
    ----------
    separator : between documents, by default a form feed
    max_tokens : most tokens to count
    name : of the text, for people

    Raises
    ------
    UsageError
        `max_tokens` is not a number above 0, or the separator is empty.
    """
    text = checked("text", text, instance(str, "text"))
    ids: list[int] = []
    counted: list[bool] = []
    text_bytes = 0
    for front, words, nbytes in _tokens(tokenizer, [text], separator, max_tokens):
        ids += [*front, *words]
        counted += [False] * len(front) + [True] * len(words)
        text_bytes += nbytes
    return Stream(tuple(ids), tuple(counted), text_bytes, name)


def read_stream(stack: ExitStack, tokenizer: Tokenizer, text: Text, separator: str | None = None,
                max_tokens: int | None = None) -> Stream:
    """Tokenise a text file as `token_stream`, without ever holding the whole text or all of its tokens in memory.

    The tokens are in a temporary file, four bytes each, until the stack is closed. A tokenizer whose texts cannot be
    cut (`text.long_texts`) still gets each document as a whole.

    Raises
    ------
    EdgeInferError
        The text cannot be read, is not UTF-8 or too long, or there is no room for the temporary file.
    UsageError
        As `token_stream`.
    """
    most = None if max_tokens is None else checked("max_tokens", max_tokens, _SOME) * tokenizer.bytes_per_token()
    try:
        file: Any = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        text_bytes = 0
        for front, words, nbytes in _tokens(tokenizer, text.pieces(most), separator, max_tokens):
            file.write(array("i", [*(~token for token in front), *words]).tobytes())
            text_bytes += nbytes
        file.flush()  # or a full disk shows only when the tokens are read
        n = file.tell() // array("i").itemsize
    except OSError as error:
        raise EdgeInferError(f"The tokens of {text.path} cannot be kept in a temporary file "
                             f"({error.strerror or error}); set TMPDIR to a directory with room for four bytes a "
                             "token.") from error
    return Stream(_Kept(file, n, False), _Kept(file, n, True), text_bytes, text.path.name)


class _Kept(Sequence[Any]):
    """Token ids in a file, or whether they count: those that do not are stored as their complements."""

    def __init__(self, file: BinaryIO, n: int, counted: bool):
        self._file, self._n, self._counted = file, n, counted

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, slice):
            return self[which : which + 1][0]
        start, stop, _ = which.indices(self._n)
        found = array("i")
        self._file.seek(start * found.itemsize)
        found.frombytes(self._file.read(max(stop - start, 0) * found.itemsize))
        return [token >= 0 for token in found] if self._counted else [max(token, ~token) for token in found]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._n, BLOCK_TOKENS):
            yield from self[start : start + BLOCK_TOKENS]


def _tokens(tokenizer: Tokenizer, text: Iterable[str], separator: str | None,
            max_tokens: int | None) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield ids that do not count, those after them that do, and the UTF-8 bytes of the latter's text."""
    separator = SEPARATOR if separator is None else checked("separator", separator, TEXT)
    left = math.inf if max_tokens is None else checked("max_tokens", max_tokens, _SOME)
    begin, begun = [] if tokenizer.bos_id is None else [tokenizer.bos_id], False
    pieces = _stripped(_documents(text, separator))
    for first in pieces:
        if first is None:
            continue
        need = 0 if begin or begun else 1  # without a beginning nothing predicts the very first token
        decoder, front, words = tokenizer.stream(skip_special=False), begin, []
        rest = takewhile(lambda piece: piece is not None, pieces)
        for some in tokenizer.encode_pieces(piece for piece in chain([first], rest) if piece is not None):
            words += some
            if len(words) <= need:
                continue
            front, words = [*front, *words[:need]], words[need:][: int(min(len(words), left))]
            yield front, words, sum(len(decoder.push(token).encode("utf-8", "replace")) for token in words)
            left -= len(words)
            front, words, need, begun = [], [], 0, True
            if left < 1:
                break
        yield [], [], len(decoder.flush().encode("utf-8", "replace"))
        if left < 1:
            return


def _documents(text: Iterable[str], separator: str) -> Iterator[str | None]:
    """Yield a text in pieces, and None after each document."""
    rest = ""
    for piece in text:
        *whole, rest = (rest + piece).split(separator)
        for document in whole:
            yield document
            yield None
        if (ready := len(rest) - len(separator) + 1) > 0:  # after it a separator may begin
            yield rest[:ready]
            rest = rest[ready:]
    yield rest
    yield None


def _stripped(pieces: Iterable[str | None]) -> Iterator[str | None]:
    """Leave out the line breaks at both ends of documents, and pieces of nothing."""
    begun, held = False, ""
    for piece in pieces:
        if piece is None:
            begun, held = False, ""
            yield None
            continue
        piece = held + piece if begun else piece.lstrip("\r\n")
        body = piece.rstrip("\r\n")
        held = piece[len(body) :]
        if body:
            begun = True
            yield body


class Text:
    """A text file, which may be a pipe, read with universal newlines."""

    def __init__(self, stack: ExitStack, path: Path):
        self.path = path
        try:
            self._file = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise self._unreadable(error) from error
        self._lines = io.IncrementalNewlineDecoder(None, translate=True)

    @property
    def changed(self) -> str:
        """Describe the changes made in reading, as the end of a sentence; empty if there are none."""
        found = self._lines.newlines or ()
        kinds = [LINE_ENDS[one] for one in ([found] if isinstance(found, str) else found) if one in LINE_ENDS]
        return f"{' and '.join(kinds)} line endings were read as LF" if kinds else ""

    def pieces(self, most: int | None = None) -> Iterator[str]:
        """Yield the text, of which the first `most` bytes are enough; by default all of it.

        Raises `EdgeInferError` if it cannot be read, is not UTF-8, or is longer than `MAX_BYTES`.
        """
        limit = MAX_BYTES if most is None else min(most + SPARE_BYTES, MAX_BYTES)
        if limit == MAX_BYTES and self._size() > MAX_BYTES:
            raise self._too_long()
        decode, done = codecs.getincrementaldecoder("utf-8")().decode, 0
        while True:
            try:
                data = self._file.read(min(READ_BYTES, limit + 1 - done))
            except OSError as error:
                raise self._unreadable(error) from error
            cut = done + len(data) > limit
            if cut and limit == MAX_BYTES:
                raise self._too_long()
            try:
                text = decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = done + len(data) - len(error.object) + error.start
                raise EdgeInferError(f"The text {self.path} is not UTF-8 (byte {at}).") from error
            yield self._lines.decode(text, final=not data)
            done += len(data)
            if cut or not data:
                return

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _too_long(self) -> EdgeInferError:
        return EdgeInferError(f"The text {self.path} is longer than {MAX_BYTES >> 20} MiB; give a part of it, or "
                              "--max-tokens, for which its beginning is enough.")

    def _unreadable(self, error: OSError) -> EdgeInferError:
        return EdgeInferError(f"The text {self.path} cannot be read: {error.strerror or error}.")
