"""Profiles on disk: those that come with the program, files of the user, and the one that the probe saved."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from edgeinfer.base.cache_dir import cache_root, make_directories
from edgeinfer.base.files import replacement
from edgeinfer.errors import DestinationError, UsageError

from .cores import cores_isa, cores_peak
from .profile import PROCESSORS, TABLE_KEYS, Curve, DeviceProfile, parse_profile
from .toml_files import read_toml

LOCAL = "local"


def _paths() -> list[Path]:
    return sorted((Path(__file__).parent / "profiles").iterdir())


@cache
def profiles() -> dict[str, DeviceProfile]:
    """Profiles that come with the program, by name; read on first use."""
    return {name: profile for path in _paths() for name, profile in _of_file(path).items()}


def _of_own_name(name: str) -> DeviceProfile | None:
    """Return the profile of a name without parsing files in which the name does not occur."""
    for path in _paths():
        if name in path.read_text(encoding="utf-8") and (found := _of_file(path).get(name)):
            return found
    return None


@cache
def _of_file(path: Path) -> dict[str, DeviceProfile]:
    found: dict[str, DeviceProfile] = {}
    tables = read_toml(path) if path.suffix == ".toml" else json.loads(path.read_text(encoding="utf-8"))
    tables.pop("about", None)
    common = tables.pop("sources", {})  # where the figures of the whole file are from
    shared_fields = tables.pop("common", {})
    for name, row in tables.items():
        table = _completed({**shared_fields, **row})
        own = table.get("sources", {})
        shared = {key: text for key, text in common.items() if key in table or key in table.get("figures", {})}
        found[name] = parse_profile(name, {**table, "sources": {**shared, **own}}, f"{path.name}, [{name}]")
    return found


def _completed(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with what follows from others of its fields: the smallest capacity, and sums over the cores."""
    if table.get("memory_gib"):
        table.setdefault("memory_bytes", table["memory_gib"][0] << 30)
    if (processor := table.get("processor")) and table["device_class"] in PROCESSORS:
        table.setdefault("cores", sum(number for number, _ in processor.values()))
        table.setdefault("isa", cores_isa(processor))
        for key, kind in (("int8_peak_gops", "int8"), ("f32_peak_gflops", "f32")):
            table.setdefault(key, cores_peak(processor, kind))
    return table


@cache
def _by_any_name() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Devices by all that they may be called; a few names are those of several."""
    from .names import keys_of

    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for profile in profiles().values():
        for key in keys_of(profile):
            found[key] = (*found.get(key, ()), profile.name)
    return found


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """Return a profile: a known name, ``local`` (what the probe saved for this machine), or a TOML file.

    Names are read as people type them: titles and aliases count, makers and cases do not matter, and a stated amount of
    memory is the profile's then.

    Raises
    ------
    UsageError
        There is no such name or file, it is the name of several devices, the device does not exist with that memory, or
        this machine was not probed.
    ProfileError
        The file is not a valid profile.
    """
    text = str(name_or_path)
    if text.lower() == LOCAL:
        return local_profile() or _not_probed()
    if exact := _of_own_name(text.lower()):
        return exact
    from .names import meant, nearest, taken_apart, with_memory

    typed, names = taken_apart(text), _by_any_name()
    if found := names.get(typed.key) or names.get(typed.whole):
        return with_memory(meant(typed, text, [profiles()[name] for name in found]), typed.memory_gib)
    path = Path(name_or_path)
    if path.suffix == ".toml" or os.sep in text or os.path.isfile(path):
        return _from_file(path, path.stem)
    raise UsageError(f"There is no device {text!r}; {nearest(typed, {key: of[0] for key, of in names.items()})}")


def local_profile() -> DeviceProfile | None:
    """Return the profile that the probe saved for this machine, or None.

    Raises
    ------
    ProfileError
        The saved file is damaged.
    """
    path = local_path()
    return _from_file(path, LOCAL) if path.is_file() else None


def local_path() -> Path:
    """Return the path of this machine's profile; machines that share the directory have other names."""
    key = hashlib.sha256(machine_name().encode()).hexdigest()[:12]
    return cache_root() / "devices" / f"local-{key}.toml"


@cache
def machine_name() -> str:
    """This machine in words: processor, logical processors, memory. A home on another machine gives another name."""
    names = getattr(os, "sysconf_names", {})
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else 0
    # Rounded up: firmware keeps some of the memory for itself, and how much changes with updates.
    gib = math.ceil(memory / 2**30)
    return f"{processor_name()}, {os.cpu_count()} logical processors, {gib} GiB, {platform.system()}"


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a profile as TOML, whole or not at all.

    Raises
    ------
    ProfileError
        A field is absurd; nothing is written.
    DestinationError
        The file cannot be written.
    """
    table = profile_table(profile)
    parse_profile(profile.name, table, str(path))
    text = "# A device profile of edgeinfer.\n" + to_toml(table)
    try:
        make_directories(path.parent)
        with replacement(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise DestinationError(
            f"The profile {path} cannot be written: {error.strerror or error}. EDGEINFER_CACHE moves the directory."
        ) from error


def profile_table(profile: DeviceProfile) -> dict[str, Any]:
    """The fields of a profile as TOML and JSON hold them; None and empty tables are left out."""
    table = {}
    for key in TABLE_KEYS:
        value = getattr(profile, key)
        if value not in (None, {}, (), ""):
            table[key] = _plain(value)
    return table


def to_toml(table: Mapping[str, Any]) -> str:
    """Write plain values, then tables of plain values."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{key}]", *(f"{_key(inner)} = {_value(item)}" for inner, item in value.items())]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if isinstance(value, tuple):
        return list(value)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    # TOML's basic strings escape as JSON's do, but for DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _from_file(path: Path, name: str) -> DeviceProfile:
    if not os.path.isfile(path):
        raise UsageError(f"There is no profile {str(path)!r}; give a file, or a name that 'edgeinfer devices' lists.")
    return parse_profile(name, read_toml(path), str(path))


def _not_probed() -> DeviceProfile:
    others = sorted(cache_root().glob("devices/local-*.toml"))
    hint = f" ({len(others)} of other machines lie in {others[0].parent})" if others else ""
    raise UsageError(f"This machine ({machine_name()}) has no profile{hint}; measure it with "
                     "'edgeinfer devices --probe'.")


def processor_name() -> str:
    """Return the name of this machine's processor, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in _processor())


def _processor() -> str:
    """Name of the processor as the system gives it."""
    if sys.platform == "darwin":
        return _mac_processor() or platform.machine()
    with suppress(OSError):
        fields: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
        if "model name" in fields:
            return fields["model name"]
        with suppress(OSError):
            board = Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
            if board:
                return board
        if "CPU part" in fields:
            return f"ARM {fields.get('CPU implementer', '')} {fields['CPU part']}"
    return platform.processor() or platform.machine()


def _mac_processor() -> str:
    """Name of a Mac's chip, such as "Apple M2 Pro"; empty if the system does not say."""
    import subprocess

    try:
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()
