"""Search of a folder for models: bundles, checkpoints, GGUF files; their contents are not read."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import HEADER_FILE

from ..checkpoint.json_file import CONFIG_FILE
from ..gguf.file import SPLIT

MAX_LEVELS = 10
"""Depth of nested folders that are searched."""
UNFINISHED = re.compile(
    r"(?:downloading_)?(.*?\.(?:gguf|safetensors))\.(?:part|partial|incomplete|download|crdownload|aria2"
    r"|downloadInProgress|tmp)|downloading_(.*\.gguf)", re.IGNORECASE)
"""Names under which programs keep a file that they are still downloading."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Ends of the names of files that hold the weights of a checkpoint."""
_KINDS = {stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True)
class Found:
    """Something that looks like a model."""

    store: str
    """Owner of its folder: edgeinfer, ollama, lmstudio, llama.cpp, hub, or folder for one that was given."""
    format: str
    """bundle, checkpoint or gguf; empty for anything else."""
    path: Path
    """A folder, or a file: of a split model the first."""
    name: str
    """Name that `run` accepts."""
    nbytes: int
    """Size of its files."""
    problem: str = ""
    """Reason why it is not a model, if that is apparent without reading it; a sentence."""


def models_below(root: Path, store: str) -> Iterator[Found]:
    """Find files and folders that look like models in a folder and below it, each folder once, in the order of names.

    Links to folders are followed within `root` alone; unreadable ones are returned with their problem.
    """
    top = os.path.realpath(root)
    seen: set[tuple[int, int]] = set()
    waiting = [(root, 0)]
    while waiting:
        folder, level = waiting.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            names = sorted(os.listdir(folder))
        except OSError as error:
            yield Found(store, "", folder, str(folder), 0, f"Cannot read {folder}: {error.strerror or error}.")
            continue
        yield from files_of(folder, names, store)
        if HEADER_FILE not in names and CONFIG_FILE not in names and level < MAX_LEVELS:
            inner = [folder / name for name in names if not name.startswith(".")]
            waiting += [(path, level + 1) for path in reversed(inner) if is_folder(path) and _is_within(path, top)]


def is_folder(path: Path) -> bool:
    """Return whether this is a folder, or may be one that cannot be looked at; listing it gives the reason."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM, errno.EIO)


def _is_within(path: Path, top: str) -> bool:
    """Return whether a folder is below another one, links resolved; only links can lead out."""
    return not os.path.islink(path) or os.path.commonpath((os.path.realpath(path), top)) == top


def files_of(folder: Path, names: list[str], store: str, name: str = "") -> Iterator[Found]:
    """Find the models in a folder itself; a checkpoint gets the `name`, if given."""
    if HEADER_FILE in names:
        yield Found(store, "bundle", folder, str(folder), _size(folder, names))
        return
    weights = [one for one in names if one.endswith(WEIGHTS)]
    if CONFIG_FILE in names and weights:
        yield Found(store, "checkpoint", folder, name or str(folder), _size(folder, weights))
    for files in gguf_models(names):
        path = folder / files[0]
        yield Found(store, "gguf", path, str(path), _size(folder, files), special(path))
    for one in names:
        if match := UNFINISHED.fullmatch(one):
            whole = match[1] or match[2]
            yield Found(store, "", folder / one, str(folder / one), _size(folder, [one]),
                        f"The download of {whole} is not complete; start it again.")


def gguf_models(names: list[str]) -> list[list[str]]:
    """Return the GGUF files of a folder, those of a split model together."""
    models: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not UNFINISHED.fullmatch(name):
            match = SPLIT.fullmatch(name)
            models.setdefault((match[1], match[3]) if match else (name, ""), []).append(name)
    return list(models.values())


def special(path: Path) -> str:
    """Explain why a name is not a plain file; empty if it is one."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return f"{path} is a link to {os.readlink(path)}, which is not there; download it again."
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        return f"Cannot read {path}: {getattr(error, 'strerror', None) or 'links that lead in a circle'}."
    if kind == stat.S_IFREG:
        return ""
    return f"{path} is {_KINDS.get(kind, 'a folder')}, not a plain file."


def _size(folder: Path, names: list[str]) -> int:
    total = 0
    for name in names:
        try:
            total += os.stat(folder / name).st_size
        except OSError:  # a link that leads nowhere has no size
            continue
    return total
