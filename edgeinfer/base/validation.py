"""Values as users give them: each has a rule, which makes it a plain Python value or refuses it in one sentence.

NumPy's scalars count as the numbers that they hold; True is not a number and 1 is no switch.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from itertools import islice
from numbers import Integral, Real
from typing import Any

from ..errors import EdgeInferError, UsageError
from .dataclass import dataclass

MAX_TEXTS = 1000
"""Most texts of one option; an endless source of texts is refused there."""
_SHOWN = 60


@dataclass(frozen=True)
class Rule:
    """Values that an option accepts."""

    want: str
    """The end of the sentence that refuses a value, after `lead`."""
    convert: Callable[[Any], Any]
    """Returns the value in plain form; a TypeError, ValueError or OverflowError refuses it."""
    kind: str = ""
    """Put before `want` where the type is wrong (TypeError) and not the size."""
    lead: str = "it must be"


def checked(name: str, value: Any, rule: Rule, error: type[EdgeInferError] = UsageError) -> Any:
    """Return the value in plain form; raises `error` if the rule does not allow it."""
    try:
        return rule.convert(_scalar(value))
    except UsageError as why:
        raise error(f"{name}: {why}") from None
    except (TypeError, ValueError, OverflowError) as why:
        want = f"{rule.kind}, {rule.want}" if rule.kind and isinstance(why, TypeError) else rule.want
        want = f"{want}, and below 2^63" if isinstance(why, OverflowError) else want
        raise error(f"{name} is {shown(value)}; {rule.lead} {want}.") from None


def shown(value: Any) -> str:
    """Return a value for a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits, and objects whose repr fails
        text = f"a {type(value).__name__} that cannot be shown"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _scalar(value: Any) -> Any:
    """Return a NumPy scalar (or array without dimensions) as the Python value that it holds."""
    scalar = hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    return value.item() if scalar else value


def _refuse_unless(good: bool) -> None:
    if not good:
        raise ValueError


def whole(value: Any) -> int:
    """Return an integer; raises TypeError for anything else, booleans included, and OverflowError beyond 64 bits."""
    value = _scalar(value)
    if isinstance(value, bool):
        raise TypeError
    value = operator.index(value)
    if abs(value) >= 2**63:
        raise OverflowError
    return value


def real(value: Any) -> float:
    """Return a number that is not NaN as it is, or as a float; raises TypeError or ValueError for anything else."""
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    decimal = float(value)  # or OverflowError
    _refuse_unless(not math.isnan(decimal))
    return int(value) if isinstance(value, Integral) and abs(decimal) < 2**53 else decimal


def integer(low: int, high: float, want: str) -> Rule:
    """An integer from `low` to `high`."""

    def convert(value: Any) -> int:
        value = whole(value)
        _refuse_unless(low <= value <= high)
        return value

    return Rule(want, convert, "an integer")


def number(good: Callable[[float], bool], want: str) -> Rule:
    """A number that is `good`."""

    def convert(value: Any) -> float:
        value = real(value)
        _refuse_unless(good(value))
        return value

    return Rule(want, convert, "a number")


def choice(names: Iterable[str]) -> Rule:
    """One of these names."""
    known = tuple(names)

    def convert(value: Any) -> str:
        _refuse_unless(isinstance(value, str) and value in known)
        return str(value)

    return Rule(f"one of {', '.join(known)}", convert, lead="choose")


def instance(kind: Any, want: str) -> Rule:
    """A value of a type (or of one of several)."""

    def convert(value: Any) -> Any:
        _refuse_unless(isinstance(value, kind))
        return value

    return Rule(want, convert)


def _function(value: Any) -> Any:
    _refuse_unless(callable(value))
    return value


def _text(value: Any) -> str:
    _refuse_unless(isinstance(value, str) and bool(value))
    value.encode("utf-8")  # a UnicodeEncodeError is a ValueError, for half a surrogate pair
    return str(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_text(value),)
    if isinstance(value, (bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise TypeError
    texts = tuple(map(_text, islice(value, MAX_TEXTS + 1)))
    _refuse_unless(len(texts) <= MAX_TEXTS)
    return texts


def _path(value: Any) -> str:
    name = os.fspath(value)
    os.fsencode(name)  # UnicodeEncodeError is a ValueError
    _refuse_unless(isinstance(name, str) and bool(name) and "\0" not in name)
    _refuse_unless(len(name) <= 4096 and max(map(len, re.split(r"[/\\]", name))) <= 255)  # else the system raises
    return str(name)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {whole(token_id): real(bias) for token_id, bias in value.items()}


FLAG = instance(bool, "True or False")
FUNCTION = Rule("a function", _function)
TEXT = Rule("text that is not empty", _text)
TEXTS = Rule(f"text, or at most {MAX_TEXTS} texts, none of them empty", _texts)
PATH = Rule("the path of a file or directory", _path)
BIASES = Rule("a mapping of token ids to numbers, such as {15043: -1.5}", _biases)
OBJECT = instance(Mapping, "a mapping of names to values")
NATS = number(lambda nats: 0 <= nats < float("inf"), "a finite number, 0 or more")


def option(default: Any, rule: Rule) -> Any:
    """Declare a field of a request type with its rule, which None passes as the default."""
    return field(default=default, metadata={"rule": rule})


def check_fields(request: Any) -> None:
    """Check the fields of a frozen request type by their rules and set them to their plain values."""
    for one in fields(request):
        if "rule" not in one.metadata:
            continue
        value = getattr(request, one.name)
        default = _default(one)
        if value is None:
            object.__setattr__(request, one.name, default)
        elif value is not default:
            object.__setattr__(request, one.name, checked(one.name, value, one.metadata["rule"]))


def similar(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` known names that are spelled like one, the nearest first."""
    from difflib import get_close_matches  # only errors need it

    return get_close_matches(name, list(known), n, cutoff)


def check_known(known: Sequence[str], options: Iterable[str]) -> None:
    """Raise `UsageError` for an option that is none of the known ones, with the nearest one that is."""
    for name in options:
        if name not in known:
            near = similar(name, known)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(known)}."
            raise UsageError(f"Unknown option {name!r}{hint}")


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()
