"""`edgeinfer models`: the models on this machine, which of them run, and which not and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...base.units import format_size
from ...errors import UsageError, printable
from ..options import Json
from ..output import COLUMNS, folded, print_json
from ..progress import ProgressLine

if TYPE_CHECKING:
    from ...models.list import LocalModel

JSON_FIELDS = {
    "models": {
        "models": "per model `name` (for `run`), `path`, `format` (bundle, checkpoint, gguf; empty for anything else, "
        "such as an incomplete download), `runs`, `reason` (why not, in the words of `run`), "
        "`remedy` (an option with which it runs nevertheless), `bytes`, `fits` (whether the plan of a run with default "
        "settings is within `budget_bytes`; null without a plan), `planned_bytes`, "
        "`mode` (resident, or how its weights are read from storage), `store` (edgeinfer, ollama, "
        "lmstudio, llama.cpp, hub; folder for one that was given), `kind` (model, or the kind of another file), "
        "`holds` (types of its weights), `source` (the checkpoint or file of a bundle)",
        "budget_bytes": "memory that this system can give now",
    },
}
"""Fields of the JSON object, by command."""
STORES = {
    "edgeinfer": "edgeinfer: embedded, and converted into the cache", "ollama": "ollama", "lmstudio": "LM Studio",
    "llama.cpp": "llama.cpp's cache", "hub": "the hub's cache", "folder": "in the folders given",
}
NAME, SIZE, HOLDS = 38, 9, 12
"""Widths of columns."""
REQUANTISED = "--weights: run it with --weights q4 (or int8, f16, f32), which requantises it."


def models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", show_default=False,
                       help="Also search these folders and their subfolders."),
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="Search only the given folders.")] = False,
    runs: Annotated[bool, typer.Option("--runs", help="List only models that run.")] = False,
    json: Json = False,
) -> None:
    """List the models on this machine that edgeinfer finds.

    The list says which of them run, and fit in memory. models looks in the cache (EDGEINFER_CACHE), in ollama's store
    (OLLAMA_MODELS), LM Studio's folders, llama.cpp's cache and the cache of the Hugging Face hub (HF_HOME). It reads
    headers only and writes nothing: a model that runs has a supported architecture, weight types and tokenizer, and
    complete files; their contents are not checked. It fits if a run with default settings fits in the memory that is
    free now.

    \b
    Examples:
      edgeinfer models
      edgeinfer models . --only --json
    """
    from edgeinfer.memory_planner import process_budget

    from ...models.list import list_models, summary

    for folder in folders or ():
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give one with models in it.")
    if only and not folders:
        raise UsageError("--only needs a FOLDER.")
    with ProgressLine() as progress:
        found = [model for model in list_models(folders or (), not only, progress) if model.runs or not runs]
    if json:
        print_json({"models": [model_object(model) for model in found], "budget_bytes": process_budget()})
        return
    for line in lines(found):
        print(line)
    if any(model.remedy for model in found):
        print("\n".join(folded(REQUANTISED)))
    print("\n".join(folded(summary(found))))


def model_object(model: LocalModel) -> dict[str, Any]:
    """Return a model as a JSON object."""
    return {"name": model.name, "path": str(model.path), "format": model.format, "runs": model.runs,
            "reason": model.reason, "remedy": model.remedy, "bytes": model.nbytes, "fits": model.fits,
            "planned_bytes": model.planned_bytes, "mode": model.mode, "store": model.store, "kind": model.kind,
            "holds": model.holds, "source": model.source}


def lines(found: list[LocalModel]) -> Iterator[str]:
    """Return a table: the stores, in each its models, below those that do not run why."""
    for store, title in STORES.items():
        of_store = [model for model in found if model.store == store]
        if of_store:
            yield title
            for model in of_store:
                yield from _rows(model)
            yield ""


def _rows(model: LocalModel) -> Iterator[str]:
    """A model's line; a name too long for its column has one of its own, and is never cut: it is to be typed."""
    rest = f"{format_size(model.nbytes):>{SIZE}}  {_cut(model.holds, HOLDS):<{HOLDS}} {_verdict(model)}"
    name = printable(model.name)
    if len(name) <= NAME:
        yield f"  {name:<{NAME}} {rest}"
    else:
        yield f"  {name}"
        yield f"  {'':<{NAME}} {rest}"
    if model.reason:
        why = model.reason.replace(str(model.path), "the file" if model.format == "gguf" else "it")
        yield from folded(f"{printable(why.split('; ')[0]).rstrip('.')}.", "      ")
    if model.source:
        yield f"      of {_cut(printable(model.source), COLUMNS - 9)}"


def _verdict(model: LocalModel) -> str:
    """Return whether it runs and fits, in a few words."""
    from edgeinfer.memory_planner import RESIDENT

    if not model.runs:
        return model.remedy or ("no" if model.kind == "model" else "no model")
    if model.fits and model.mode != RESIDENT:
        return "streamed"
    return "runs" if model.fits else f"needs {format_size(model.planned_bytes or 0)}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:width - 2]}.."
