"""How large a template's operation can make its result, computed before it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

TOO_LARGE = 1 << 60
"""Stands for operations that are refused outright."""

MAX_SIZE = 1 << 24
MAX_LEVELS = 100

_WIDTH = re.compile(r"\d{6,}")


def text_size(value: Any) -> int:
    """Return roughly how long ``str(value)`` is, `TOO_LARGE` above `MAX_SIZE` or `MAX_LEVELS` levels of nesting.

    Lists may share parts, so that a short template makes a value whose text is exponentially long.
    """
    if isinstance(value, str):
        return len(value)
    size, level = 0, [value]
    for _ in range(MAX_LEVELS):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item) + 4
            elif isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                below += item
            else:
                size += max(24, item.bit_length() // 3) if isinstance(item, int) else 24
            if size + 16 * len(below) > MAX_SIZE:
                return TOO_LARGE
        if not below:
            return size
        level = below
    return TOO_LARGE


def estimate_call(function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> int:
    """Return an upper bound of the characters that calling this method of a string makes; 0 for other functions."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, str):
        return 0
    return _estimate(getattr(function, "__name__", ""), owner, [*args, *options.values()])


def estimate_filter(name: str, values: Sequence[Any], options: Mapping[str, Any]) -> int:
    """Return an upper bound of the characters that the filter makes of ``values[0]``."""
    if not values:
        return 0
    args = [*values[1:], *options.values()]
    if name == "join":
        return _joined(str(args[0]) if args else "", values[0])
    if name in ("string", "tojson"):
        return text_size(values[0])
    if name in ("batch", "slice"):
        return max(map(_size, args), default=0)
    if name == "sum":
        return 0 if all(isinstance(arg, (int, float, str)) for arg in args) else TOO_LARGE
    text = values[0] if isinstance(values[0], str) else ""
    if name in ("indent", "wordwrap"):
        return len(text) + (len(text) + 1) * max(map(_size, args), default=4)
    return _estimate(name, text, args)


def _estimate(name: str, text: str, args: Sequence[Any]) -> int:
    if name in ("center", "ljust", "rjust", "zfill"):
        return len(text) + max(map(_size, args), default=80)
    if name == "expandtabs":
        return len(text) + text.count("\t") * max(map(_size, args), default=8)
    if name == "replace" and len(args) > 1:
        return len(text) + text.count(str(args[0])) * len(str(args[1]))
    if name == "join":
        return _joined(text, args[0] if args else ())
    if name in ("format", "format_map"):
        return estimate_format(text, args)
    if name == "translate":
        return TOO_LARGE
    return len(text)


def estimate_format(pattern: Any, args: Sequence[Any]) -> int:
    """Return an upper bound for ``pattern % args`` and ``pattern.format(*args)``: each field as long as the longest."""
    if not isinstance(pattern, str):
        return 0
    if _WIDTH.search(pattern):
        return TOO_LARGE
    n_fields = pattern.count("{") + pattern.count("%")
    longest = max((_size(arg) if isinstance(arg, (str, int)) else 0 for arg in args), default=0)
    if longest > 1_000_000 and ("*" in pattern or re.search(r"\{[^}]*\{", pattern)):
        return TOO_LARGE  # a width taken from the arguments
    n_digits = 100_000 if re.search(r"\d{3,}", pattern) else 1000
    return len(pattern) + n_fields * (max(map(text_size, args), default=0) + n_digits)


def _joined(separator: str, values: Any) -> int:
    if not hasattr(values, "__len__"):
        return 0
    return len(values) * len(separator) + sum(text_size(value) for value in values)


def _size(value: Any) -> int:
    """Return the width that a number asks for, or the length of a text."""
    return value if isinstance(value, int) else len(value) if isinstance(value, str) else 0
