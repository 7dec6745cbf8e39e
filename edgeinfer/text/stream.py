"""Streaming detokenisation: text appears as soon as its characters are complete, and never sooner."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as Items
from copy import copy

CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8, at most."""


class StreamDecoder:
    """Turns token ids into text one by one; made by `Tokenizer.stream`.

    Every token stands for bytes (byte-level BPE, or SentencePiece with byte-fallback pieces), so a character may
    span several tokens. The pieces of `push` and the rest of `flush` together equal ``Tokenizer.decode`` of all ids.
    An incomplete character is held back; bytes that can no longer become one turn into U+FFFD, one for each maximal
    subpart (Unicode standard, section 3.9, as Python's ``errors="replace"``).

    Parameters
    ----------
    token_bytes : maps a token id to the bytes that it stands for
    n_leading_spaces : spaces that the tokenizer put before the text and that decoding takes away again
    prompt_ids : ids before the first pushed one; they yield no text, but a continuation keeps its leading space and
        completes a character that the prompt began
    """

    def __init__(self, token_bytes: Callable[[int], bytes], n_leading_spaces: int, prompt_ids: Items[int] = ()):
        self._token_bytes = token_bytes
        self._n_leading_spaces = n_leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        read = 0
        while read < len(prompt_ids) and self._n_leading_spaces:
            self.push(prompt_ids[read])
            read += 1
        self._utf8.decode(self._end(prompt_ids, read))

    def _end(self, ids: Items[int], first: int) -> bytes:
        """Return the last bytes of a prompt, from the token `first` on: those before them say nothing of a character
        that is incomplete, however long the prompt is."""
        end = b""
        for i in range(len(ids) - 1, first - 1, -1):
            end = self._token_bytes(ids[i]) + end
            if len(end) >= CHARACTER_BYTES:
                break
        return end

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        data = self._token_bytes(token_id)
        if self._n_leading_spaces and data:
            stripped = data[: self._n_leading_spaces].lstrip(b" ") + data[self._n_leading_spaces :]
            n_stripped = len(data) - len(stripped)
            # A token of nothing but spaces may leave more of them to take away from the next one.
            self._n_leading_spaces = 0 if stripped else self._n_leading_spaces - n_stripped
            data = stripped
        return self._utf8.decode(data)

    def fork(self) -> StreamDecoder:
        """Return a decoder that goes its own way from here."""
        reference = copy(self)
        reference._utf8 = type(self._utf8)("replace")
        reference._utf8.setstate(self._utf8.getstate())
        return reference

    def flush(self) -> str:
        """Return U+FFFD for a character that stayed incomplete, else nothing; further ids may follow."""
        return self._utf8.decode(b"", final=True)
