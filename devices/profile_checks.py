"""Checks of a profile's file: every complaint names the file, the field, the value and the permitted values."""

from __future__ import annotations

import bisect
import datetime
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.validation import similar
from edgeinfer.errors import ProfileError

from .cores import core_kinds

MAX_GBS = 1e6
LEAST = 1e-6
"""Fields that cannot be zero: rates in their units, and shares."""
MAX_OPERATIONS = 1e9
"""Most operations, in 1e9 per second."""
MAX_BYTES = 1 << 50
MAX_CORES = 1 << 20
MAX_CLOCK = 100.0
"""Highest clock in GHz."""
MAX_SHOWN = 60
"""Characters of a wrong value that a complaint quotes."""
SHARES = ("f_w", "f_kv", "mfu", "mfu_attention", "few_rows", "unhidden")
CONSTANTS = {**dict.fromkeys(SHARES, 1.0), "t0_ms": 1e4, "token_ms": 1e4, "activation_cost": 1e5, "attention_ms": 1e4}
MAY_BE_ZERO = ("t0_ms", "token_ms", "activation_cost", "attention_ms", "unhidden")
"""Constants of the estimator and the largest value of each: shares of the bandwidth that weights and the KV cache draw,
shares of the int8 peak that a prompt's matrices and its attention reach, and matrices of up to 16 rows, the share of
the reading of weights that arithmetic of several rows does not hide, milliseconds per token and 32 layers, and per
token, that are spent on neither, and operations of the peak whose time a prompt spends on a value between matrices."""
FIGURES = {"clock_ghz": (0.01, 100.0), "ecc_share": (0.01, 1.0)}
"""The least and the largest value of figures that the estimator divides by."""


@dataclass(frozen=True)
class Curve:
    """GB/s over chunk size: between two points by the logarithms of both sizes, constant beyond the ends."""

    points: tuple[tuple[int, float], ...]
    """(bytes of a chunk, GB/s), ascending in bytes; for some curves of a probe (threads, value)."""

    def at(self, chunk_bytes: int) -> float:
        """Value at a chunk size."""
        sizes = [size for size, _ in self.points]
        above = bisect.bisect_left(sizes, chunk_bytes)
        if above == 0 or above == len(sizes):
            return self.points[min(above, len(sizes) - 1)][1]
        (low, a), (high, b) = self.points[above - 1], self.points[above]
        share = math.log(chunk_bytes / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(a) + share * math.log(b))


class Checker:
    """Checks values; every complaint names the file, the field, the value and the permitted values."""

    def __init__(self, where: str):
        self.where = where

    def fail(self, name: str, value: object, want: str) -> NoReturn:
        """Raise `ProfileError` for a value."""
        text = repr(value)
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        raise ProfileError(f"{self.where}: {name} is {shown}; {want}.")

    def keys(self, table: Mapping[str, Any], known: Iterable[str]) -> None:
        """Check that the required fields are there and no others."""
        for key in ("title", "device_class", "memory_bytes", "bandwidth_gbs", "cores", "isa"):
            if key not in table:
                raise ProfileError(f"{self.where}: {key} is missing; every profile gives title, device_class, "
                                   "memory_bytes, bandwidth_gbs, cores and isa.")
        self.known("field", table, tuple(known))

    def known(self, kind: str, names: Iterable[str], known: tuple[str, ...]) -> None:
        """Check that all names are known."""
        for name in names:
            if name not in known:
                near = similar(name, known)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
                raise ProfileError(f"{self.where}: there is no {kind} {name!r}; {hint}")

    def text(self, name: str, value: object) -> str:
        """Return a text."""
        if not isinstance(value, str) or not value.strip() or len(value) > 1000:
            self.fail(name, value, "it must be a text of 1 to 1000 characters in quotes")
        return str(value)

    def name(self, name: str, value: object) -> str:
        """Return a text on one line."""
        text = self.text(name, value)
        if not text.isprintable():  # it is shown on terminals, which take some characters for commands
            self.fail(name, value, "it must be on one line and without control characters")
        return text

    def items(self, name: str, value: object, what: str = "whole numbers") -> list[Any]:
        """Return a list."""
        if not isinstance(value, list | tuple):
            self.fail(name, value, f"it must be a list of {what}")
        return list(value)

    def texts(self, name: str, value: object) -> tuple[str, ...]:
        """Return a list of texts."""
        return tuple(self.name(name, item) for item in self.items(name, value, "texts"))

    def choice(self, name: str, value: object, choices: tuple[str, ...]) -> str:
        """Return one of a few texts."""
        if value not in choices:
            self.fail(name, value, f"choose one of {', '.join(choices)}")
        return str(value)

    def whole(self, name: str, value: Any, most: int, unit: str) -> int:
        """Return a whole number of 1 or more."""
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.fail(name, value, f"it must be a whole number of {unit} from 1 to {most}")
        return int(value)

    def number(self, name: str, value: Any, most: float, zero: bool = False, least: float = LEAST) -> float:
        """Return a number within its limits."""
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (least <= value <= most or (zero and value == 0)):
            self.fail(name, value, f"it must be {'0, or ' if zero else ''}a number from {least:g} to {most:g}")
        return float(value)

    def table(self, name: str, value: object) -> Mapping[str, Any]:
        """Return a table."""
        if not isinstance(value, Mapping):
            self.fail(name, value, f"it must be a table, written [{name}]")
        return value

    def figures(self, value: object) -> dict[str, float]:
        """Return the table of further figures."""
        figures = {}
        for key, figure in self.table("figures", value).items():
            least, most = FIGURES.get(key, (LEAST, MAX_OPERATIONS))
            figures[key] = self.number(f"figures.{key}", figure, most, key not in FIGURES, least)
        return figures

    def constants(self, value: object) -> dict[str, float]:
        """Return the constants of the estimator."""
        table = self.table("constants", value)
        self.known("constant", table, tuple(CONSTANTS))
        for key in SHARES:
            if isinstance(table.get(key), int | float) and table[key] > 1:
                self.fail(f"constants.{key}", table[key], "a share above 1 is impossible: other programs disturbed the "
                          "measurement. Of this machine, measure again with 'edgeinfer devices --probe'")
        return {key: self.number(f"constants.{key}", value, CONSTANTS[key], zero=key in MAY_BE_ZERO)
                for key, value in table.items()}

    def processor(self, value: object) -> dict[str, tuple[int, float]]:
        """Return the kinds of cores with their numbers and clocks."""
        found = {}
        for kind, pair in self.table("processor", value).items():
            self.choice("a kind of core in processor", kind, tuple(core_kinds()))
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                self.fail(f"processor.{kind}", pair, "it must be a number of cores and their clock in GHz: [4, 2.4]")
            found[kind] = (self.whole(f"processor.{kind}", pair[0], MAX_CORES, "cores"),
                           self.number(f"processor.{kind}", pair[1], MAX_CLOCK))
        return found

    def curve(self, name: str, value: Any) -> Curve:
        """Return a curve."""
        if not isinstance(value, list) or not value or \
                not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            self.fail(name, value, "it must be a list of pairs, as in [[4096, 0.4], [65536, 1.5]]")
        points = [(self.whole(f"a size in {name}", size, MAX_BYTES, "bytes"),
                   self.number(f"a value in {name}", speed, MAX_OPERATIONS)) for size, speed in value]
        for (before, _), (size, _) in itertools.pairwise(points):
            if size <= before:
                self.fail(f"a size in {name}", size, f"sizes must ascend, and it follows {before}")
        return Curve(tuple(points))

    def moment(self, name: str, value: Any) -> str:
        """Return a date and time."""
        try:
            return datetime.datetime.fromisoformat(value).isoformat()
        except (TypeError, ValueError):
            self.fail(name, value, "it must be a date and time such as '2026-05-01T12:00:00'")
