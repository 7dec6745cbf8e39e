"""Removal of unused files from the cache: sets that newer ones replaced, and remains of killed processes.

It runs before a build, so at most as often as that. A set counts as used on each day that a process links it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

UNUSED_DAYS = 7
"""Age at which an unused set of the same instruction set is removed when a new one comes."""
DEAD_SECONDS = 86400
"""Age at which hidden files and directories go: nothing is under way for a day."""


def tidy(directory: Path) -> None:
    """Remove superseded sets of the instruction set of `directory` beside it, and remains, beside and in it.

    Files that cannot be removed stay: other processes may be at the same.
    """
    now = time.time()
    kept = directory.name.rpartition("-")[0]  # without the hash
    for entry in (*directory.parent.iterdir(), *directory.iterdir()):
        with contextlib.suppress(OSError):
            age = now - entry.lstat().st_mtime
            if entry.name.startswith(".") and age > DEAD_SECONDS:
                _remove(entry)
            elif entry.name.rpartition("-")[0] == kept and entry != directory and age > UNUSED_DAYS * 86400:
                aside = entry.with_name(f".old-{secrets.token_hex(8)}")
                os.rename(entry, aside)  # at once: no process finds half a set
                _remove(aside)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    elif not entry.name.endswith(".lock"):
        entry.unlink()
