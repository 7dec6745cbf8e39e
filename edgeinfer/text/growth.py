"""Functions that a chat template may use, and bounds on the size of their results, computed before they run.

The lists hold the needs of templates in use (methods of text and of mappings, filters, tests) and nothing else: a
method that a later version of Python adds to a type is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

TOO_LARGE = 1 << 60
"""Marker of operations that are refused outright."""

MAX_LEVELS = 100
MAX_NEEDLE_WORK = 1 << 27
"""Most comparisons of characters in searches from the right, which Python does one by one."""

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize center count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isspace "
        "isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rjust rpartition rsplit "
        "rstrip split splitlines startswith strip swapcase title upper zfill".split()),
    dict: frozenset("get items keys values".split()),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
}
"""Methods by the exact type of their owner."""

FILTERS = frozenset(
    "abs attr capitalize center count d default dictsort first float format groupby indent int items join last length "
    "list lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title "
    "tojson trim unique upper".split())

TESTS = frozenset(
    "!= < <= == > >= boolean callable defined divisibleby eq equalto even false float ge greaterthan gt in integer "
    "iterable le lessthan lower lt mapping ne none number odd sameas sequence string true undefined upper".split())

_TEXT_ARGUMENTS = (str, int, float, tuple, type(None))
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
BRACES = re.compile(r"\{\{|\}\}|\{[A-Za-z0-9_]{0,32}(:[<>^]?0?\d{0,2},?(\.\d{1,2})?[a-zA-Z%]?)?\}")
PERCENT = re.compile(r"%(\([A-Za-z0-9_]{1,32}\))?[-+ 0#]?\d{0,2}(\.\d{1,2})?[sdifgeExX%]")
_ESCAPED = 12
"""Most characters that one character becomes in JSON or in a Python literal."""
_ITEM = 100
"""Bytes that a small object of a list takes at most, with its reference."""


def text_size(value: Any) -> int:
    """Return roughly how long ``str(value)`` is, `TOO_LARGE` above `MAX_LEVELS` levels of nesting.

    Lists may share parts, so that a short template makes a value whose text is exponentially long; each part is
    looked at once.
    """
    return len(value) if isinstance(value, str) else _size(value, {}, 0)


def _size(value: Any, known: dict[int, int], level: int) -> int:
    if isinstance(value, str):
        return len(value) + 4
    if not isinstance(value, (list, tuple, dict, set, frozenset)):
        return max(24, value.bit_length() // 3) if isinstance(value, int) else 24
    if id(value) not in known:
        if level >= MAX_LEVELS:
            return TOO_LARGE
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 16 + sum(16 + _size(item, known, level + 1) for item in items)
    return known[id(value)]


def estimate_method(owner: Any, name: str, args: Sequence[Any]) -> int:
    """Return an upper bound of the bytes that this method of an allowed type makes."""
    if not isinstance(owner, str):
        return _ITEM * (1 + len(owner))
    if not all(isinstance(arg, _TEXT_ARGUMENTS) or name in ("join", "format") for arg in args):
        return TOO_LARGE
    return 4 * estimate_format(owner, args, BRACES) if name == "format" else _estimate(owner, name, args)


def estimate_filter(name: str, value: Any, args: Sequence[Any]) -> int:
    """Return an upper bound of the bytes that the filter makes of `value`."""
    if name == "join":
        return 4 * _joined(str(args[0]) if args else "", value)
    if name in ("int", "float", "round", "abs"):
        small = text_size(value) <= 1000 and all(isinstance(arg, (str, int, float)) for arg in args)
        return 1000 if small and all(not isinstance(arg, int) or abs(arg) <= 36 for arg in args) else TOO_LARGE
    if name == "sum":
        return 100 if all(isinstance(arg, (int, float, str)) for arg in args) else TOO_LARGE
    if name == "indent":
        text, width = str(value), max(map(_width, args), default=4)
        lines = 1 + sum(map(text.count, _LINE_ENDS))
        return 4 * (len(text) + lines * (width + _ITEM)) if width <= 1000 else TOO_LARGE
    if name in ("string", "tojson"):
        return 4 * _ESCAPED * text_size(value) if not isinstance(value, str) or name == "tojson" else 0
    if name in ("center", "replace", "format", "title", "trim"):
        return _estimate(str(value), name, args)
    size = text_size([value, *args])
    return (_ITEM if isinstance(value, str) and name in ("list", "sort", "unique", "groupby") else 4) * size


def _estimate(text: str, name: str, args: Sequence[Any]) -> int:
    """Return the bound for a method of text, or the filter of the same name."""
    if name in ("center", "ljust", "rjust", "zfill"):
        return 4 * (len(text) + max(map(_width, args), default=80))
    if name == "replace" and len(args) > 1:
        return 4 * (len(text) + (text.count(str(args[0])) + (args[0] == "")) * len(str(args[1])))
    if name == "join":
        return 4 * _joined(text, args[0] if args else ())
    if name == "format":
        return 4 * estimate_format(text, args)
    if name in ("rfind", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"):
        needle = max((len(arg) for arg in args if isinstance(arg, str)), default=1)
        if needle * len(text) > MAX_NEEDLE_WORK:
            return TOO_LARGE
    if name in ("split", "rsplit", "splitlines", "title"):
        separator = next((arg for arg in args if isinstance(arg, str) and arg), None)
        pieces = 1 + (text.count(separator) if separator else len(text) // 2)
        return 4 * len(text) + _ITEM * pieces
    return 12 * len(text)  # a capital may become three letters, of four bytes each


def estimate_format(pattern: str, args: Sequence[Any], fields: re.Pattern[str] = PERCENT) -> int:
    """Return an upper bound of the characters of ``pattern % args``, or of ``pattern.format(*args)`` for `BRACES`.

    Fields are names or numbers, with a width of two digits at most.
    """
    if re.search("[%]" if fields is PERCENT else "[{}]", fields.sub("", pattern)):
        return TOO_LARGE
    longest = max((len(arg) if isinstance(arg, str) else _ESCAPED * text_size(arg) for arg in args), default=0)
    return len(pattern) + len(fields.findall(pattern)) * (longest + 500)


def _joined(separator: str, values: Any) -> int:
    if isinstance(values, str):
        return len(values) * (1 + len(separator))
    if not hasattr(values, "__len__"):
        return TOO_LARGE
    return len(values) * len(separator) + sum(
        len(value) if isinstance(value, str) else _ESCAPED * text_size(value) for value in values)


def _width(value: Any) -> int:
    """Return the width that a number asks for, or the length of a text."""
    return value if isinstance(value, int) else len(value) if isinstance(value, str) else 0
