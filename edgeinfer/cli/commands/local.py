"""`edgeinfer pull`, `rm` and `ps`: get a model, delete its converted bundle, list processes that run one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...base.cache_dir import CacheEntry, cache_entries, clear_cache
from ...base.units import format_size
from ...errors import ModelNotFoundError, UsageError, printable
from ..options import GroupSize, Json, Model, Weights
from ..output import confirm, print_json, print_table
from ..progress import ProgressLine

JSON_FIELDS = {
    "pull": {"model": "as given", "path": "its bundle", "bytes": "of the bundle's files"},
    "rm": {"deleted": "bundles that were deleted: `name`, `path`, `bytes`", "freed_bytes": "their sum"},
    "ps": {"processes": "per process of this program that the system shows: `pid`, `command`, `model`, `rss_bytes` "
                        "held now, `seconds` since it began"},
}
"""Fields of the JSON object, by command."""
WITH_MODELS = ("run", "bench", "eval", "convert", "export", "sparsify", "pull")


def pull(model: Model, weights: Weights = None, group_size: GroupSize = None, json: Json = False) -> None:
    """Download a model and convert it into the cache.

    The first run of a model does the same. A checkpoint, a GGUF file or a model of ollama is only converted. Existing
    files are kept.

    \b
    Examples:
      edgeinfer pull smollm2-135m
      edgeinfer pull hf:OWNER/REPO:Q4_K_M
    """
    from ...models import Storage, resolve

    with ProgressLine() as progress:
        path = resolve(model, progress, storage=Storage(weights, group_size))
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if json:
        print_json({"model": model, "path": str(path), "bytes": nbytes})
    else:
        print(f"{printable(model)} is ready ({format_size(nbytes)}): edgeinfer run {printable(model)}")


def rm(
    model: Annotated[str, typer.Argument(
        metavar="MODEL", show_default=False,
        help="Model as for run and pull, or the name of its bundle in 'edgeinfer cache list'.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """Delete the converted bundles of a model.

    Downloads in the hub's cache and files of other programs are kept, because other programs share them.

    \b
    Example:
      edgeinfer rm smollm2-135m
    """
    entry = _converted(model)
    if not yes:
        confirm(f"Delete {printable(entry.name)} ({format_size(entry.nbytes)})?")
    freed = clear_cache([entry])
    if json:
        print_json({"deleted": [{"name": entry.name, "path": str(entry.path), "bytes": entry.nbytes}],
                    "freed_bytes": freed})
    else:
        print(f"{printable(entry.name)} deleted, {format_size(freed)}. Downloads in the hub's cache are kept.")


def _converted(model: str) -> CacheEntry:
    """Return the bundle of a model in the cache; raises `UsageError` if nothing was converted."""
    from ...models import DEMO, resolve

    entries = {os.path.realpath(entry.path): entry for entry in cache_entries(("bundles",))}
    for entry in entries.values():
        if entry.name == model:
            return entry
    if model == DEMO:
        raise UsageError("demo is part of the package and cannot be deleted.")
    try:
        found = entries.get(os.path.realpath(resolve(model, convert=False)))
    except ModelNotFoundError:
        found = None
    if found is None:
        raise UsageError(f"{model!r} is not a model that edgeinfer has converted, and it deletes no others; 'edgeinfer "
                         "cache list' lists those it can delete.")
    return found


def ps(json: Json = False) -> None:
    """List running edgeinfer processes, with their model and memory.

    No server keeps models open: each process opens its own.
    """
    found = sorted(running(), key=lambda one: one["pid"])
    if json:
        print_json({"processes": found})
    elif not found:
        print("No other edgeinfer process is running.")
    else:
        rows = [(str(one["pid"]), one["command"], printable(one["model"] or ""), format_size(one["rss_bytes"]),
                 f"{one['seconds']:.0f} s") for one in found]
        print_table([("pid", "command", "model", "memory", "time"), *rows], right=[0, 3, 4])


def running() -> Iterator[dict[str, Any]]:
    """Find other processes of the command line; those that the system does not show are left out."""
    import psutil

    for process in psutil.process_iter(["pid", "cmdline", "memory_info", "create_time"]):
        known = process.info
        words = arguments_of(known["cmdline"] or [])
        if known["pid"] == os.getpid() or not words or known["memory_info"] is None:
            continue
        model = words[1] if words[1:] and not words[1].startswith("-") else None  # after options it may be a value
        yield {"pid": known["pid"], "command": words[0], "model": model if words[0] in WITH_MODELS else None,
               "rss_bytes": known["memory_info"].rss, "seconds": time.time() - known["create_time"]}


def arguments_of(command: list[str]) -> list[str]:
    """Return the arguments in a command line of this program; empty for other programs."""
    for number, word in enumerate(command[:4]):
        by_python = number == 1 and Path(command[0]).name.lower().startswith("python")
        script = Path(word).name in ("edgeinfer", "edgeinfer.exe") and (number == 0 or by_python)
        if script or (word == "edgeinfer" and number and command[number - 1] == "-m"):
            return command[number + 1 :]
    return []
