"""Typed, bounded access to a checkpoint's config; fields that are neither read nor known to be harmless are refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .fields import HARMLESS, NEUTRAL, QUANTISED

ABSENT: Any = object()


class ConfigReader:
    """Fields of one JSON object.

    Parameters
    ----------
    fields : mapping
        The object as parsed.
    where : str
        How messages call it, such as ``config.json``.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json"):
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"{where} holds {_show(fields)}; it must be a JSON object of named fields.")
        self.where = where
        self._fields = fields
        self._read: set[str] = set()
        self._names: dict[str, str] = {}

    def called(self, **names: str) -> None:
        """Declare other names of fields in this config, such as n_embd for hidden_size; both names are accepted."""
        self._names |= {name: own for name, own in names.items() if own in self._fields or name not in self._fields}

    def _own(self, name: str) -> str:
        return self._names.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, `default` if it is absent (null counts as a value)."""
        self._read.add(self._own(name))
        return self._fields.get(self._own(name), default)

    def has(self, name: str) -> bool:
        """True if the field is there and not null."""
        return self._fields.get(self._own(name)) is not None

    def is_null(self, name: str) -> bool:
        """True if the field is there and null, which some architectures tell from an absent one."""
        return self._own(name) in self._fields and self._fields[self._own(name)] is None

    def integer(self, name: str, default: int | None = ABSENT, low: int = 1, high: int = 2**31 - 1) -> Any:
        """Whole number from low to high; without a default the field is needed. A default of None lets null pass."""
        value = self._value(name, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = ABSENT, above: float = 0.0, high: float = 1e12) -> Any:
        """Finite number above `above`, at most `high`; defaults as in `integer`."""
        value = self._value(name, default)
        if value is None and default is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not above < value <= high:
            raise self._wrong(name, value, f"a number above {above:g} and at most {high:g}")
        return float(value)

    def own_code(self) -> None:
        """Pass over Python code that a checkpoint brings along: that of an architecture which is known here."""
        self._read.add("auto_map")

    def numbers(self, name: str, high: float = 1e6) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self._value(name, ABSENT)
        good = isinstance(value, list) and value and all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= high for v in value)
        if not good:
            raise self._wrong(name, value, f"a list of numbers above 0 and at most {high:g}")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; null is the default."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, value: Any, choices: Collection[str]) -> str:
        """Return `value`, or refuse it as unsupported if it is not among the choices."""
        if not isinstance(value, str) or value not in choices:
            raise self.unsupported(name, value, f"supported: {', '.join(choices)}")
        return str(value)

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids: one, a list, or none."""
        value = self.get(name)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self._wrong(name, value, f"token ids from 0 to {vocab_size - 1} (vocab_size - 1)")
        return tuple(dict.fromkeys(listed))

    def items(self) -> dict[str, Any]:
        """All fields, as they are there."""
        return dict(self._fields)

    def instead(self, **fields: Any) -> ConfigReader:
        """Return a reader with other values of some fields; fields read there count as read here."""
        other = ConfigReader({**self._fields, **fields}, self.where)
        other._read, other._names = self._read, self._names
        return other

    def section(self, name: str) -> ConfigReader | None:
        """Return the object under a name, None if it is absent, null or empty."""
        value = self.get(name)
        return None if value is None or value == {} else ConfigReader(value, f"{self.where}, {name}")

    def unsupported(self, name: str, value: Any, remedy: str) -> UnsupportedModelError:
        """The error for a field whose value asks for mathematics that is not here."""
        shown = f"{self._own(name)} is {_show(value)}"
        return UnsupportedModelError(f"{self.where}: {shown}, which edgeinfer does not support; {remedy}.")

    def refuse_unread(self, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
        """Refuse fields that may change the mathematics and were not read.

        A field passes if it was read, is listed in fields.HARMLESS, or has a value that switches it off: one of
        `neutral` where it is listed there, else null, false, 0 or empty.
        """
        for name, value in self._fields.items():
            if name in self._read or name in HARMLESS:
                continue
            if name in QUANTISED and value:
                raise self.unsupported(name, value, "convert the checkpoint that was not quantised")
            if name == "auto_map" and not _brings_code(value):
                continue
            if name in neutral:
                if value is not None and value not in neutral[name]:
                    allowed = " or ".join(_show(v) for v in neutral[name])
                    raise self.unsupported(name, value, f"only {allowed} is supported")
            elif value:
                raise self.unsupported(name, value, "if it does not change the forward pass, remove it from the file")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            if default is ABSENT:
                raise CheckpointError(f"{self.where} lacks {self._own(name)!r}, which the model needs; download the "
                                      "file again.")
            return default
        return value

    def _wrong(self, name: str, value: Any, want: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self._own(name)} is {_show(value)}; it must be {want}.")


def _brings_code(auto_map: Any) -> bool:
    """Return whether a checkpoint's own Python code (which cannot be read here) defines its forward pass."""
    return not isinstance(auto_map, Mapping) or any("Model" in str(key) for key in auto_map)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
