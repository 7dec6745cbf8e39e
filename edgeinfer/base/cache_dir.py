"""The user's cache: converted checkpoints, compiled kernels, checks that passed; all of it can be made again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from ..errors import DestinationError
from .dataclass import dataclass
from .files import os_errors

KINDS = ("bundles", "kernels", "checks", "quality", "onnx", "calibration")


@dataclass(frozen=True)
class CacheEntry:
    """One thing in the cache."""

    kind: str
    """bundles (a converted checkpoint), kernels (the objects of one instruction set), checks (bundles whose files
    were compared with their checksums), quality (measured divergence of a bundle's approximations), onnx (a
    model lowered for onnxruntime) or calibration (statistics of a model's activations)."""
    name: str
    path: Path
    nbytes: int


def cache_root() -> Path:
    """Return the directory of this user's cache; EDGEINFER_CACHE moves it."""
    root = os.environ.get("EDGEINFER_CACHE")
    return Path(root) if root else user_directory("cache")


def user_directory(kind: str) -> Path:
    """Return edgeinfer's directory among a user's files of a kind: cache or config.

    Raises
    ------
    DestinationError
        The user has no home directory.
    """
    home = os.environ.get("HOME", "")
    if sys.platform.startswith("linux") and os.path.isabs(home):  # platformdirs would take 4 ms of every command
        given = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
        return Path(given, "edgeinfer") if os.path.isabs(given) else Path(home, f".{kind}", "edgeinfer")
    import platformdirs

    try:
        found = (platformdirs.user_cache_path if kind == "cache" else platformdirs.user_config_path)("edgeinfer")
    except RuntimeError:  # of newer versions; older ones return a path that begins with ~
        found = Path("~")
    if not found.is_absolute():
        raise DestinationError("The home directory of this user is unknown; set HOME to a directory.")
    return found


def make_directories(path: Path) -> None:
    """Make a directory of the cache and those above it that are absent, for this user alone: it holds code."""
    for step in (*reversed(path.parents), path):
        if not step.is_dir():
            step.mkdir(mode=0o700, exist_ok=True)


def cache_entries(kinds: Iterable[str] = KINDS) -> list[CacheEntry]:
    """Return the contents of the cache, remains of interrupted work included, by kind and name."""
    found = []
    for kind in kinds:
        directory = cache_root() / kind
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                found.append(CacheEntry(kind, path.name, path, directory_size(path)))
    return found


def clear_cache(entries: Iterable[CacheEntry]) -> int:
    """Delete entries; return the bytes freed.

    Raises
    ------
    DestinationError
        An entry cannot be deleted.
    """
    freed = 0
    for entry in entries:
        with os_errors(DestinationError, f"{entry.path} cannot be deleted"):
            shutil.rmtree(entry.path)
        freed += entry.nbytes
    return freed


def directory_size(directory: Path) -> int:
    """Return the bytes of all files in a directory; those that vanish meanwhile count nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # a process that builds here is moving its files
                continue
    return total


def cache_errors(directory: Path) -> AbstractContextManager[None]:
    """Raise an `OSError` within as a `DestinationError`: this directory of the cache cannot be written."""
    return os_errors(DestinationError, f"The cache {directory} cannot be written",
                     "; set EDGEINFER_CACHE to another directory.")
