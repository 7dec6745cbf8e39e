"""Storage by kind, and scattered reads of memory by class, for devices of which neither was measured (storage.toml)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.validation import similar
from edgeinfer.errors import UsageError

from .profile import PROCESSORS, Curve, DeviceProfile
from .toml_files import read_toml

STORAGE_SPREAD, MEMORY_SPREAD = "storage_spread", "memory_random_spread"
"""Figures of a profile: half-widths of the bands of reads from storage, and of scattered reads of memory."""
MEASURED_SPREAD = 0.15
"""The same where the probe measured them."""
_BOARDS, _PHONES, _MACS = ("arm-sbc", "riscv-sbc"), "arm-phone", ("apple-cpu", "apple-gpu")
_ON_BOARDS = ("sd", "emmc", "usb3", "sata", "nvme-x1", "nvme-gen3", "nvme")


@dataclass(frozen=True)
class Storage:
    """A kind of storage."""

    name: str
    """Name that ``--storage`` takes."""
    title: str
    sequential_gbs: float
    """Bandwidth of long reads."""
    random: Curve
    """GB/s of scattered reads by their size, eight at a time."""
    spread: float
    """Half-width of the band as a share."""
    source: str


@cache
def _tables() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("storage.toml"))


@cache
def storages() -> dict[str, Storage]:
    """Kinds of storage by name."""
    return {name: Storage(name, row["title"], row["sequential_gbs"], _curve(row["random"]), row["spread"],
                          row["source"]) for name, row in _tables()["kinds"].items()}


def storage_of(name: str) -> Storage:
    """Return a kind of storage; raises `UsageError` for an unknown name."""
    known = storages()
    if found := known.get(name.strip().lower()):
        return found
    near = similar(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."
    raise UsageError(f"There is no storage {name!r:.80}; {hint}")


def equipped(profile: DeviceProfile, kind: str | None = None) -> DeviceProfile:
    """Return a device with figures for storage and for scattered reads of memory, where it has none of its own.

    Parameters
    ----------
    profile : DeviceProfile
    kind : str, optional
        Name of the storage, instead of the device's own; by default the one that is usual in its class. A probed
        machine keeps its measurements.

    Raises
    ------
    UsageError
        There is no such storage.
    """
    if profile.measured is not None and kind is None:
        return profile
    found = storage_of(kind) if kind else _usual(profile)
    own = profile.storage_sequential_gbs
    sequential = _within_slot(profile, found) if kind else own or found.sequential_gbs
    figures, sources = dict(profile.figures), dict(profile.sources)
    random = profile.storage_random
    if kind or random is None:
        random = _scaled(found.random, min(1.0, sequential / found.sequential_gbs))
        figures[STORAGE_SPREAD] = found.spread
        sources["storage_random"] = f"{found.title}: {found.source}"
    if kind or own is None:
        sources["storage_sequential_gbs"] = f"{found.title}: {found.source}"
    memory = profile.memory_random
    if memory is None:
        row = _tables()["memory"]["cores" if profile.device_class in (*PROCESSORS, "local") else "gpu"]
        memory = _scaled(_curve(row["share"]), profile.bandwidth_gbs)
        figures[MEMORY_SPREAD], sources["memory_random"] = row["spread"], row["source"]
    return replace(profile, storage_sequential_gbs=sequential, storage_random=random, memory_random=memory,
                   figures=figures, sources=sources)


def spread_of(profile: DeviceProfile, figure: str) -> float:
    """Return the half-width of a band of reads: `STORAGE_SPREAD` or `MEMORY_SPREAD`."""
    return profile.figures.get(figure, MEASURED_SPREAD)


def with_reads(profile: DeviceProfile, storage: float = 1.0, memory: float = 1.0) -> DeviceProfile:
    """Return a device with its reads from storage, and scattered reads of memory, so many times as fast."""
    gbs, random, rows = profile.storage_sequential_gbs, profile.storage_random, profile.memory_random
    return replace(profile, storage_sequential_gbs=gbs and gbs * storage,
                   storage_random=random and _scaled(random, storage), memory_random=rows and _scaled(rows, memory))


def slow_and_fast(profile: DeviceProfile) -> Iterator[DeviceProfile]:
    """Yield a device with its reads at the lower and at the upper end of their bands."""
    stored, rows = spread_of(profile, STORAGE_SPREAD), spread_of(profile, MEMORY_SPREAD)
    yield with_reads(profile, 1 - stored, 1 - rows)
    yield with_reads(profile, 1 + stored, 1 + rows)


def _usual(profile: DeviceProfile) -> Storage:
    """Return the kind that is usual in a device's class; of boards the one that reads about as fast as stated."""
    known, gbs = storages(), profile.storage_sequential_gbs
    if profile.device_class in _BOARDS:
        return min((known[name] for name in _ON_BOARDS), key=lambda one: abs(1 - one.sequential_gbs / gbs)) if gbs \
            else known["nvme-x1"]
    if profile.device_class == _PHONES:
        return known["ufs3" if gbs and gbs < 3 else "ufs4"]
    return known["apple" if profile.device_class in _MACS else "nvme"]


def _within_slot(profile: DeviceProfile, kind: Storage) -> float:
    """Return GB/s of long reads of a kind in this device: an SSD is no faster than the slot that the device has."""
    source, own = profile.sources.get("storage_sequential_gbs", ""), profile.storage_sequential_gbs
    slot = own if own and "NVMe" in source and "typical" not in source and kind.name.startswith("nvme") else None
    return min(kind.sequential_gbs, slot or kind.sequential_gbs)


def _curve(points: list[list[float]]) -> Curve:
    return Curve(tuple((int(size), float(value)) for size, value in points))


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, value * factor) for size, value in curve.points))


def storage_report(profile: DeviceProfile, kind: str | None = None) -> Mapping[str, Any]:
    """Return the known figures of a device's storage, for reports."""
    random, gbs = profile.storage_random, profile.storage_sequential_gbs
    found = storage_of(kind) if kind else _usual(profile)
    slot = " as fast as its slot" if kind and gbs and gbs < found.sequential_gbs else ""
    return {
        "kind": found.title + slot if profile.measured is None or kind else "storage as probed",
        "sequential_gbs": gbs, "spread": spread_of(profile, STORAGE_SPREAD),
        "random_gbs": [list(point) for point in random.points] if random else None,
        "source": profile.sources.get("storage_random", ""),
    }
