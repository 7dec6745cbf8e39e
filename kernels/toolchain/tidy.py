"""What builds leave in the cache: sets that newer ones replaced, and scratch directories of builds that were killed.

It runs before a build, so at most as often as that. Nothing that anybody may still use is touched: a set counts as used
on each day that a process links it, a scratch directory as long as its process lives or its files are young.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from .objects import MANIFEST

UNUSED_DAYS = 7
"""A set of the same instruction set that nobody has linked for so long goes when a new one comes."""
DEAD_SECONDS = 3600
"""Age at which the scratch directory of a process that has ended is removed."""
_SCRATCH = ("build", "staged", "old")


def scratch_prefix(kind: str) -> str:
    """Beginning of a scratch directory's name, which tells whose it is."""
    return f".{kind}-{os.getpid()}-"


def tidy(directory: Path) -> None:
    """Remove superseded sets of the instruction set of `directory`, and remains, from the directory around it.

    What cannot be removed stays: other processes may be at the same.
    """
    now = time.time()
    kept = directory.name.rpartition("-")[0]  # without the hash
    for entry in directory.parent.iterdir():
        with contextlib.suppress(OSError):
            if _is_superseded(entry, directory, kept, now):
                aside = entry.with_name(f"{scratch_prefix('old')}{entry.name}")
                os.rename(entry, aside)  # at once: nobody finds half a set
                shutil.rmtree(aside, ignore_errors=True)
            elif _is_remains(entry, now):
                shutil.rmtree(entry, ignore_errors=True)


def _is_superseded(entry: Path, directory: Path, kept: str, now: float) -> bool:
    if entry == directory or entry.name.rpartition("-")[0] != kept:
        return False
    manifest = entry / MANIFEST
    used = (manifest if manifest.exists() else entry).stat().st_mtime
    return now - used > UNUSED_DAYS * 86400


def _is_remains(entry: Path, now: float) -> bool:
    import psutil

    kind, _, rest = entry.name.removeprefix(".").partition("-")
    if not entry.name.startswith(".") or kind not in _SCRATCH or now - entry.stat().st_mtime < DEAD_SECONDS:
        return False
    process = rest.partition("-")[0]
    return not (process.isdigit() and psutil.pid_exists(int(process)))
