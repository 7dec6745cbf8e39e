"""Lowered models in the user's cache: a bundle is lowered once for each type of its model, and opened from there."""

from __future__ import annotations

import hashlib
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.base.cache_dir import cache_errors, cache_root, make_directories
from edgeinfer.base.files import open_plain
from edgeinfer.base.lock import DestinationLock
from edgeinfer.base.process import say
from edgeinfer.bundle import Bundle

from ...base.progress import OnStageProgress
from .copying import copy_proto
from .flavour import Flavour

KIND, MODEL, COPY, DONE = "onnx", "model.onnx", "copy.onnx", "done"
"""Folder of the cache; files of a model, of which the last describes the others."""
Copied = tuple[str, str, int]
MADE_BY = ("backends/onnx", "graph", "quant")
"""Folders of the package that determine the result for a bundle."""


def model_folder(bundle: Bundle, flavour: Flavour, copied: list[Copied],
                 progress: OnStageProgress | None = None) -> Path:
    """Return the folder of a lowered model, which is written unless it is there: `MODEL` with its data, and `COPY`.

    Parameters
    ----------
    bundle : Bundle
    flavour : Flavour
        As `Flavour.checked` returns it.
    copied : list of (str, str, int)
        Name, type and axes of each slab of the KV cache and of states.
    progress : callable, optional
        As for `export`.

    Raises
    ------
    DestinationError
        The cache cannot be written, or its disk is full.
    UsageError
        The model is to be written, and the package onnx is not installed.
    """
    folder = cache_root() / KIND / f"{bundle.path.name[:40]}-{_key(bundle, flavour)}"
    if _complete(folder):
        return folder
    lock = DestinationLock(folder)
    announced: list[bool] = []

    def waiting() -> None:
        if not announced:
            say("Another process is lowering this model; waiting for it.")
            announced.append(True)

    try:
        with cache_errors(folder):
            make_directories(folder.parent)
            lock.acquire(waiting)
            if not _complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                _write(bundle, flavour, copied, folder, progress)
    finally:
        lock.release()
    return folder


def _write(bundle: Bundle, flavour: Flavour, copied: list[Copied], folder: Path, progress: OnStageProgress | None
           ) -> None:
    from .export import export  # plans need the names above, and nothing that lowers a model

    make_directories(folder)
    export(bundle, folder / MODEL, flavour, overwrite=True, progress=progress)
    (folder / COPY).write_bytes(copy_proto(copied).SerializeToString(deterministic=True))
    (folder / DONE).write_text(_states(folder), encoding="utf-8")


def _complete(folder: Path) -> bool:
    """Return whether a model was written completely, and its files were not changed since."""
    try:
        want = _states(folder).encode()
        with open_plain(folder / DONE) as file:
            return file.read(len(want) + 1) == want != b""
    except OSError:
        return False


def _states(folder: Path) -> str:
    """Name, bytes and time of each file."""
    paths = sorted(path for path in folder.iterdir() if path.name != DONE and not path.name.startswith("."))
    found = [(path.name, path.stat()) for path in paths]
    return "\n".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in found)


def _key(bundle: Bundle, flavour: Flavour) -> str:
    return hashlib.sha256(repr((bundle.identity, flavour, lowering_sources())).encode()).hexdigest()[:16]


@cache
def lowering_sources() -> str:
    """Return the checksum of the code that makes models here: another version makes others."""
    own: Any = hashlib.sha256()
    for folder in MADE_BY:
        for path in sorted((Path(edgeinfer.__file__).parent / folder).rglob("*.py")):
            own.update(path.read_bytes())
    return str(own.hexdigest())
