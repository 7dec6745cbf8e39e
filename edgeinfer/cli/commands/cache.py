"""`edgeinfer cache`: list and clear the user's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from ...base.cache_dir import KINDS, CacheEntry, cache_entries, cache_root, clear_cache
from ...base.units import format_size
from ...errors import BundleError, UsageError, printable
from ..options import Json
from ..output import confirm, print_json, table

JSON_FIELDS = {
    "cache list": {
        "directory": "the cache",
        "bundles": "converted checkpoints: `name`, `path`, `bytes`, `source` (the checkpoint or file of each)",
        "kernels": "sets of compiled kernels, likewise",
        "checks": "bundles whose files passed the check on opening, likewise",
        "quality": "measured divergences of approximations of a bundle, likewise",
        "onnx": "models that were lowered for onnxruntime, likewise",
        "calibration": "statistics of activations over a text, likewise",
        "total_bytes": "sum",
    },
    "cache clear": {
        "directory": "the cache",
        "bundles": "converted checkpoints that were deleted",
        "kernels": "sets of compiled kernels that were deleted",
        "checks": "the memory of passed checks, if it was deleted",
        "quality": "measurements of approximations that were deleted",
        "onnx": "models lowered for onnxruntime that were deleted",
        "calibration": "statistics of activations that were deleted",
        "total_bytes": "their sum",
        "freed_bytes": "bytes deleted",
    },
}
"""Fields of the JSON object, by command."""
app = typer.Typer(
    help="List or delete converted models and compiled kernels.", rich_markup_mode=None, invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def show(command: typer.Context) -> None:
    """List or delete converted models and compiled kernels."""
    if not command.invoked_subcommand:
        list_entries()


@app.command("list")
def list_entries(json: Json = False) -> None:
    """List the contents of the cache, as 'edgeinfer cache' does."""
    entries = cache_entries()
    if json:
        print_json(_report(entries))
        return
    rows = [(entry.kind, entry.name, format_size(entry.nbytes)) for entry in entries]
    total = sum(entry.nbytes for entry in entries)
    *shown, last = table([*rows, ("total", str(cache_root()), format_size(total))], right=[2])
    for entry, line in zip(entries, shown, strict=True):
        print(line)
        if source := made_of(entry):
            print(f"{'':9}of {source}")
    print(last)


@app.command("clear")
def clear(
    kind: Annotated[
        str | None, typer.Argument(metavar="|".join(KINDS), help="Delete only this part.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """Delete all of the cache, or a part of it.

    Everything except measurements of quality is recreated when it is needed.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"There is no part {kind!r} of the cache; choose one of {', '.join(KINDS)}.")
    entries = cache_entries(KINDS if kind is None else (kind,))
    if entries and not yes:
        size = format_size(sum(entry.nbytes for entry in entries))
        confirm(f"Delete {_entries(entries)} ({size}) of {cache_root()}?")
    freed = clear_cache(entries)
    if json:
        print_json({**_report(entries), "freed_bytes": freed})
    else:
        print(f"{_entries(entries)} deleted, {format_size(freed)}.")


def made_of(entry: CacheEntry) -> str:
    """Return the source of a bundle, empty for others; a damaged one is reported when it is used."""
    from ...bundle import Bundle

    if entry.kind != "bundles":
        return ""
    try:
        with Bundle.open(entry.path, compare=False) as bundle:
            return printable(bundle.header.source)
    except BundleError:
        return ""


def _entries(entries: list[CacheEntry]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def _report(entries: list[CacheEntry]) -> dict[str, object]:
    kinds: dict[str, list[dict[str, object]]] = {kind: [] for kind in KINDS}
    for entry in entries:
        kinds[entry.kind].append({"name": entry.name, "path": str(entry.path), "bytes": entry.nbytes,
                                  **({"source": made_of(entry)} if entry.kind == "bundles" else {})})
    return {"directory": str(cache_root()), **kinds, "total_bytes": sum(entry.nbytes for entry in entries)}
