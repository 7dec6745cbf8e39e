"""Profiles by name or path: those that come with the program, files of the user, and the one that the probe saved."""

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
from edgeinfer.base.files import os_errors, replacement
from edgeinfer.errors import DestinationError, UsageError

from .known import by_own_name
from .profile import TABLE_KEYS, Curve, DeviceProfile, parse_profile
from .toml_files import read_toml

LOCAL = "local"


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """Return a profile: a known name, ``local`` (this machine, as the probe saved it), or a TOML file.

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
    if own := by_own_name(text.lower()):
        return own
    from .lookup import no_device, of_any_name

    if found := of_any_name(text):
        return found
    path = Path(name_or_path)
    if path.suffix == ".toml" or (os.sep in text and " " not in text) or os.path.isfile(path):
        return _from_file(path, path.stem)
    raise no_device(text)


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
    with os_errors(DestinationError, f"The profile {path} cannot be written", ". EDGEINFER_CACHE moves the directory."):
        make_directories(path.parent)
        with replacement(path) as file:
            file.write(text.encode())


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
