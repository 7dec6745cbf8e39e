"""From the text of a token to the bytes that it stands for, for the two families of tokenizers in use.

* byte-level BPE (GPT-2, Llama 3, Qwen): each of the 256 bytes is written as one printable character;
* SentencePiece-like (Llama 2, Mistral): U+2581 is a space, ``<0xE3>`` is a byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..base.dataclass import dataclass
from ..errors import TokenizerError

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceRules:
    """Conversion of tokens to bytes."""

    byte_level: bool = False
    """True if each character of a token is one byte."""
    byte_fallback: bool = False
    """A token ``<0xNN>`` is one byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """(pattern, text) pairs applied in this order."""
    n_leading_spaces: int = 0
    """Spaces taken away at the start of the whole text."""

    def to_bytes(self, piece: str) -> bytes:
        """Return the bytes that the token with this text stands for."""
        if self.byte_level:
            table = _byte_level_table()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode("utf-8")  # an added token, written as plain text
        match = _BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for pattern, text in self.replacements:
            piece = piece.replace(pattern, text)
        return piece.encode("utf-8")


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """Return character -> byte: printable Latin-1 stands for itself, the others for 256, 257, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def rules_of_decoder(decoder: Mapping[str, Any] | None, source: str) -> PieceRules:
    """Read the ``decoder`` part of a tokenizer.json.

    Only decoders that work token by token are accepted: they alone can be streamed exactly.

    Raises `TokenizerError`: the decoder is of another kind, or absent; the message names it.
    """
    steps = [decoder]
    if decoder is not None and decoder.get("type") == "Sequence":
        steps = list(decoder.get("decoders") or [])
    rules = PieceRules()
    for step in steps:
        rules = _add_step(rules, step or {}, source)
    return rules


def _add_step(rules: PieceRules, step: Mapping[str, Any], source: str) -> PieceRules:
    kind = step.get("type")
    values = vars(rules)
    if kind == "ByteLevel":
        return PieceRules(**{**values, "byte_level": True})
    if kind == "ByteFallback":
        return PieceRules(**{**values, "byte_fallback": True})
    if kind == "Fuse":
        return rules
    if kind == "Metaspace":
        mark = str(step.get("replacement") or SPACE_MARK)
        prepends = step.get("prepend_scheme", "always") != "never"
        replacements = (*rules.replacements, (mark, " "))
        return PieceRules(**{**values, "replacements": replacements, "n_leading_spaces": int(prepends)})
    pattern = (step.get("pattern") or {}).get("String")
    if kind == "Replace" and pattern:
        return PieceRules(**{**values, "replacements": (*rules.replacements, (pattern, str(step.get("content", ""))))})
    if kind == "Strip" and step.get("content") == " " and step.get("stop") == 0:
        return PieceRules(**{**values, "n_leading_spaces": int(step.get("start") or 0)})
    raise TokenizerError(
        f"{source} decodes text with {kind!r}, which edgeinfer does not know; it knows ByteLevel, Metaspace, "
        "ByteFallback, Fuse, Replace of a string and Strip of leading spaces."
    )
