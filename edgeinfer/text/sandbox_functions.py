"""Functions and namespaces for chat templates, with bounds on their work."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.filters import do_round
from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

_STRFTIME = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,200}")


MAX_COLLISIONS = 256
"""Keys of one dictionary or set that may have the same hash: n of them take n^2 / 2 comparisons, in one step."""


class WorkLimitError(TemplateError):
    """A template did more work than it may."""


class RefusedError(TemplateError):
    """A template called ``raise_exception``."""


class BoundedNamespace(Namespace):
    """Jinja's namespace without underscored names, which could be taken for Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:
        values = bounded_dict(*args[1:], **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # printing may take exponential time for nested shared values


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def check_hashes(keys: Iterable[Any]) -> None:
    """Refuse keys if too many have the same hash, such as integers that differ by multiples of 2^61 - 1."""
    counts = Counter(hash(key) for key in keys if isinstance(key, Hashable))
    if counts and max(counts.values()) > MAX_COLLISIONS:
        raise WorkLimitError(f"it puts more than {MAX_COLLISIONS} keys with the same hash into a dictionary")


def bounded_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """Return a dictionary of a mapping or of pairs, as ``dict`` does."""
    for pairs in args[:1]:
        if not isinstance(pairs, Mapping):
            check_hashes(pair[0] for pair in pairs if isinstance(pair, (tuple, list)) and pair)
    return dict(*args, **values)


def round_number(value: Any, precision: int = 0, method: str = "common") -> Any:
    """Return a number rounded, as Jinja rounds, to a bounded number of digits."""
    if not isinstance(precision, int) or abs(precision) > 15:
        raise WorkLimitError("round takes a precision of 15 digits at most")
    return do_round(value, precision, method)  # type: ignore[arg-type]


def strftime_now(pattern: Any) -> str:
    """Return the time by a pattern, of which no part can be widened."""
    if not isinstance(pattern, str) or not _STRFTIME.fullmatch(pattern):
        raise WorkLimitError("strftime_now takes a pattern of at most 200 characters, without widths")
    return datetime.now().strftime(pattern)


def raise_exception(message: Any = "no reason given") -> None:
    """Raise the template author's error."""
    raise RefusedError(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as chat templates expect it: not escaped for web pages, no ASCII escapes."""
    if isinstance(indent, (int, str)) and len(" " * min(indent, 17) if isinstance(indent, int) else indent) > 16:
        raise WorkLimitError("tojson may indent by 16 at most")
    if separators is not None and any(len(text) > 16 for text in separators):
        raise WorkLimitError("tojson takes separators of at most 16 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
