"""Tokenise the continuation of a text: without the space that some tokenizers put before every text.

Tokenizers in the manner of SentencePiece write " a text" where a text begins, so that a word has the same token there
as after a space. Text that continues in the middle must not get that space: " good" would be tokenised as "  good".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Flags of an added token."""


class Continuing(NamedTuple):
    """Tokenizer of text that is appended to other text."""

    tokenizer: Any
    ids: Mapping[int, int]
    """Ids of added tokens by the ids of `tokenizer`, if the two differ."""
    borders: frozenset[int]
    """Added tokens after which text starts like a new one, with a space before it."""


def without_leading_space(tokenizer: Any) -> Continuing | None:
    """Return a ``tokenizers.Tokenizer`` that adds no space before a text; None if the given one adds none.

    The new one shares the vocabulary and merges, which are nearly all of a tokenizer's memory. A normaliser puts its
    space before the added tokens, too, that are looked for in normalised text, so the new one looks for their
    normalised form. After these the normalised text continues; after others, and wherever a pre-tokenizer puts the
    space, a text starts over.
    """
    normalizer, splitter = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    changed = _unprefixed(normalizer), _unprefixed(splitter)
    if changed == (normalizer, splitter):
        return None
    other = type(tokenizer).from_str(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": changed[0],
        "pre_tokenizer": changed[1], "post_processor": None, "decoder": _state(tokenizer.decoder),
        "model": {"type": "BPE", "vocab": {}, "merges": []}}))
    other.model = tokenizer.model
    ids: dict[int, int] = {}
    borders = set()
    for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        if changed[1] != splitter or not token.normalized:
            borders.add(token_id)
        if changed[0] != normalizer and token.normalized:
            flags = {name: getattr(token, name) for name in FLAGS}
            token = type(token)(tokenizer.normalizer.normalize_str(token.content), **flags)
        (other.add_special_tokens if token.special else other.add_tokens)([token])
        ids[other.token_to_id(token.content)] = token_id
    return Continuing(other, {theirs: ours for theirs, ours in ids.items() if theirs != ours}, frozenset(borders))


def _state(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer as tokenizer.json has it."""
    return json.loads(part.__getstate__()) if part is not None else None


def _unprefixed(part: Mapping[str, Any] | None) -> Any:
    """Return a normaliser or pre-tokeniser without the part that puts a space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return {**part, name: [left for one in part[name] if (left := _unprefixed(one)) is not None]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if "add_prefix_space" in part else part
