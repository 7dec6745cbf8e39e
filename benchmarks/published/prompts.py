"""Speeds of prompts that others published: shares of the peak, each device left out of those that predict it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from edgeinfer.devices import Constants, constants_of, peak_of, prefill_terms
from edgeinfer.devices.profile import PROCESSORS

from .rows import Row

FLOATS = ("F16", "BF16")
MIN_OF_FAMILY = 2
"""Other devices of a generation from which on its share is used, rather than its class's."""
OF_ATTENTION = 0.5
"""Share of the peak that attention reaches, of that of the matrices."""


@dataclass(frozen=True)
class Prompt:
    """A row beside its prediction."""

    row: Row
    tok_per_s: float

    @property
    def miss(self) -> float:
        """Predicted over measured, less one."""
        return self.tok_per_s / self.row.tok_per_s - 1


def with_peak(rows: Sequence[Row]) -> list[Row]:
    """Rows of prompts on devices whose peak is known or computed; processors have one for codes of integers alone."""
    return [row for row in rows if not row.decodes and peak_of(row.profile, constants_of(row.profile))
            and not (row.type in FLOATS and row.profile.device_class in PROCESSORS)]


def _speed(row: Row, constants: Constants) -> float:
    traffic = replace(row.traffic, prefill_weight_bytes=row.read_bytes)
    return 1000 * row.tokens / math.fsum(prefill_terms(row.profile, traffic, constants, 0, row.tokens).values())


@cache
def reached(row: Row) -> float:
    """The share of the peak that a row's matrices reached, if attention reaches half of it."""
    low, high = 1e-4, 1e2
    constants = constants_of(row.profile)
    for _ in range(30):
        share = math.sqrt(low * high)
        faster = _speed(row, _with(constants, share)) > row.tok_per_s
        low, high = (low, share) if faster else (share, high)
    return low


def _with(constants: Constants, share: float) -> Constants:
    return replace(constants, mfu=share, mfu_attention=OF_ATTENTION * share)


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Median share of devices' medians, by kind of device and by kind and generation ('cuda.ada', 'cpu.avx2')."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for key in keys_of(row):
            found.setdefault(key, {}).setdefault(row.profile.name, []).append(reached(row))
    return {key: statistics.median(statistics.median(values) for values in devices.values())
            for key, devices in found.items() if "." not in key or len(devices) >= MIN_OF_FAMILY}


def keys_of(row: Row) -> tuple[str, ...]:
    """Kinds whose share a row takes, the narrowest last; of processors the set of instructions is the generation."""
    profile = row.profile
    if profile.device_class in PROCESSORS and profile.device_class != "apple-cpu":
        return "cpu", f"cpu.{profile.isa}"
    kind = "cuda" if profile.device_class.startswith("cuda-") else profile.device_class
    return (profile.device_class, *((f"{kind}.{profile.family}",) if profile.family else ()))


def leave_one_device_out(rows: Sequence[Row]) -> list[Prompt]:
    """Predict the prompts of every device with the shares of the others."""
    found = []
    for device in dict.fromkeys(row.known.name for row in rows):
        table = shares([row for row in rows if row.known.name != device])
        for row in rows:
            known = [table[key] for key in keys_of(row) if key in table]
            if row.known.name == device and known:
                found.append(Prompt(row, _speed(row, _with(constants_of(row.profile), known[-1]))))
    return found
