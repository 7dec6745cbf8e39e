"""`edgeinfer info --environment`: the facts about an installation and a machine that a report of a fault needs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.cache_dir import KINDS, cache_entries, cache_root
from ...base.units import format_size
from ...errors import UsageError, printable
from .. import settings
from ..output import print_json, print_table

PACKAGES = ("numpy", "numba", "llvmlite", "onnxruntime", "onnxruntime-gpu")
FIELD = (
    "with --environment, which prints this field alone: `edgeinfer` (`version`, `commit`), `python`, `packages` "
    "(version by name, null where absent), `system`, `processor`, `isa` (`chosen`, `available`, `refused`), `cores` "
    "(`logical`, `used`), `memory` (`total_bytes`, `available_bytes`), `cache` (`directory`, `state`, `bytes`, "
    "`entries` by kind), `variables` (`name`, `value`, `origin`); without names of user and host")


def show(json: bool) -> None:
    """Print the environment as a table, or as one JSON object."""
    report = environment()
    if json:
        print_json({"environment": report})
    else:
        print_table(_rows(report))


def environment() -> dict[str, Any]:
    """Return versions, machine, cache and variables, without the names of user and host."""
    from ...devices import processor_name
    from ...memory_planner import available_bytes, default_threads

    return {
        "edgeinfer": {"version": __version__, "commit": commit()},
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": {name: _version(name) for name in PACKAGES},
        "system": anonymous(platform.platform()),
        "processor": processor_name(),
        "isa": _isa(),
        "cores": {"logical": os.cpu_count(), "used": default_threads()},
        "memory": {"total_bytes": _total_bytes(), "available_bytes": available_bytes()},
        "cache": _cache(),
        "variables": [
            {"name": name, "value": anonymous(value), "origin": settings.origin(name)}
            for name, value in sorted(os.environ.items()) if name.startswith("EDGEINFER_")
        ],
    }


def commit() -> str | None:
    """Return the commit of a checkout, ending in "-dirty" where files differ, or that pip installed; else None."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        return None
    from importlib import metadata  # some 25 modules, which every command would pay for

    with suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution("edgeinfer").read_text("direct_url.json") or ""
        found = re.search(r'"commit_id": *"([0-9a-f]{12})', installed)
        return found.group(1) if found else None
    return None


def anonymous(text: str) -> str:
    """Return a text with ~ for the home directory and placeholders for the names of user and host."""
    import getpass
    import socket

    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    host = socket.gethostname()
    names = {host: "<host>", host.partition(".")[0]: "<host>"}
    with suppress(KeyError, OSError, ImportError):  # a user without an entry has no name to hide
        names[getpass.getuser()] = "<user>"
    for name, placeholder in names.items():
        if name:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", placeholder, text)
    return text


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _isa() -> dict[str, Any]:
    from ...kernels import available, choose

    there = [isa.name for isa in available()]
    try:
        return {"chosen": choose().name, "available": there, "refused": None}
    except UsageError as error:
        return {"chosen": None, "available": there, "refused": str(error)}


def _total_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _cache() -> dict[str, Any]:
    root = cache_root()
    entries = cache_entries() if os.access(root, os.R_OK) else []
    return {
        "directory": anonymous(str(root)), "state": _state(root), "bytes": sum(entry.nbytes for entry in entries),
        "entries": {kind: sum(entry.kind == kind for entry in entries) for kind in KINDS},
    }


def _state(root: Path) -> str:
    if not root.exists():
        return "absent"
    if not root.is_dir():
        return "not a directory"
    return "writable" if os.access(root, os.R_OK | os.W_OK | os.X_OK) else "not writable"


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    isa, cache, memory, cores = (report[part] for part in ("isa", "cache", "memory", "cores"))
    entries = ", ".join(f"{count} {kind}" for kind, count in cache["entries"].items() if count) or "empty"
    found = report["edgeinfer"]
    return [
        ("edgeinfer", f"{found['version']} ({'commit ' + found['commit'] if found['commit'] else 'no commit known'})"),
        ("Python", report["python"]),
        *((name, version or "not installed") for name, version in report["packages"].items()),
        ("system", report["system"]),
        ("processor", printable(report["processor"])),
        ("instructions", f"{isa['chosen'] or isa['refused']} (available: {', '.join(isa['available']) or 'none'})"),
        ("cores", f"{cores['logical']} logical, {cores['used']} used"),
        ("memory", f"{format_size(memory['total_bytes'])}, {format_size(memory['available_bytes'])} available"),
        ("cache", f"{cache['directory']}, {cache['state']}: {format_size(cache['bytes'])}, {entries}"),
        *((one["name"], f"{printable(one['value'])} ({one['origin']})") for one in report["variables"]),
    ]
