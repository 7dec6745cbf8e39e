"""Profiles that come with the program: those that are listed, and further processors that are found by name alone."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from .cores import cores_isa, cores_peak
from .profile import PROCESSORS, DeviceProfile, parse_profile
from .toml_files import read_toml


def _paths(folder: str = "profiles") -> list[Path]:
    return sorted((Path(__file__).parent / folder).iterdir())


@cache
def profiles() -> dict[str, DeviceProfile]:
    """Profiles that come with the program and are listed, by name; read on first use."""
    return {name: profile_of(path, name) for path in _paths() for name in _rows(path)}


@cache
def all_rows() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the file and the fields of every profile, those of further processors included, which are not listed."""
    return {name: (path, row) for path in (*_paths(), *_paths("processors")) for name, row in _rows(path).items()}


def by_own_name(name: str) -> DeviceProfile | None:
    """Return the profile of a name without parsing files in which the name does not occur; None if there is none."""
    for path in (*_paths(), *_paths("processors")):
        text = _text(path)
        if (f'"{name}"' in text or f"[{name}]" in text) and name in _rows(path):
            return profile_of(path, name)
    return None


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _tables(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of a file of profiles, and where the figures of the whole file are from."""
    tables = read_toml(path) if path.suffix == ".toml" else json.loads(path.read_text(encoding="utf-8"))
    tables.pop("about", None)
    sources, common = tables.pop("sources", {}), tables.pop("common", {})
    return {name: {**common, **row} for name, row in tables.items()}, sources


def _rows(path: Path) -> dict[str, Any]:
    return _tables(path)[0]


@cache
def profile_of(path: Path, name: str) -> DeviceProfile:
    """Return the profile of a name in a file."""
    rows, sources = _tables(path)
    table = _completed(dict(rows[name]))
    own = table.get("sources", {})
    shared = {key: text for key, text in sources.items() if key in table or key in table.get("figures", {})}
    return parse_profile(name, {**table, "sources": {**shared, **own}}, f"{path.name}, [{name}]")


def _completed(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with fields that follow from others: the smallest capacity, and sums over the cores."""
    if table.get("memory_gib"):
        table.setdefault("memory_bytes", table["memory_gib"][0] << 30)
    if (processor := table.get("processor")) and table["device_class"] in PROCESSORS:
        table.setdefault("cores", sum(number for number, _ in processor.values()))
        table.setdefault("isa", cores_isa(processor))
        for key, kind in (("int8_peak_gops", "int8"), ("f32_peak_gflops", "f32")):
            table.setdefault(key, cores_peak(processor, kind))
    return table
