"""JSON from untrusted files: nesting is bounded, so that readers stay within the stack."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_DEPTH = 64
"""Levels of lists and objects within each other; tokenizers, the deepest files in use, have about ten."""


def parse_json(text: bytes | str, unique: bool = False) -> Any:
    """Return the value of a JSON text.

    Parameters
    ----------
    text : bytes or str
        Bytes are UTF-8.
    unique : bool
        Refuse cases that JSON's own standard leaves open: names that occur twice in an object, and NaN and infinities.

    Raises
    ------
    ValueError
        The text is not JSON, nests deeper than `MAX_DEPTH` levels, or holds texts that are not Unicode.
    """
    pairs, constants = (_unique, _refuse) if unique else (None, None)
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constants)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_DEPTH} levels") from None
    check_depth(value)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds one half of a pair of surrogates, which is not a character") from None
    return value


def check_depth(value: Any) -> None:
    """Refuse a tree of lists and objects with more than `MAX_DEPTH` levels (ValueError)."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [node for node in level if type(node) in (list, dict) and node]
        level = []
        for node in containers:
            items = node if type(node) is list else node.values()
            if not _PLAIN.issuperset(map(type, items)):  # most containers of a vocabulary hold nothing but numbers
                level.extend(items)
        if not level:
            return
    raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


_PLAIN = frozenset((str, int, float, bool, type(None)))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return result


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
