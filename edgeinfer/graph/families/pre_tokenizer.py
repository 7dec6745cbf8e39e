"""Splitting of text into words before byte-level BPE, for GGUF files."""

from __future__ import annotations

from typing import Any

from ...base.dataclass import dataclass

DIGITS = "digits"
"""Placeholder for single digits among regular expressions."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True)
class PreTokenizer:
    """A family's pre-tokenizer, and the defaults that llama.cpp assumes for it."""

    splits: tuple[str, ...] = ()
    """Regular expressions (Oniguruma), each splitting the rest of the one before; `DIGITS` means single digits."""
    gpt2: bool = False
    """GPT-2's words come last."""
    ignore_merges: bool = False
    """A word that is a token is taken as it is."""
    add_bos: bool = False
    """The beginning-of-text token is in front where the file does not say."""
    byte_level: bool = True
    """Pieces are written in GPT-2's alphabet of bytes; else in UTF-8 with marks for spaces, bytes as <0xNN>."""

    def steps(self) -> list[dict[str, Any]]:
        """Return the pre-tokenizers of a tokenizer.json."""
        found: list[dict[str, Any]] = []
        for split in self.splits:
            found.append({"type": "Digits", "individual_digits": True} if split == DIGITS else
                         {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
        if self.byte_level:
            found.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": self.gpt2})
        return found
