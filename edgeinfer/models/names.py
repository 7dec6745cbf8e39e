"""Names of models: the demo, short names, names in stores, ids on the hub; and suggestions for a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.validation import similar
from ..bundle import is_bundle

if TYPE_CHECKING:
    from ..graph import Shape

DEMO = "demo"
KNOWN_NAMES = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""Short names of models on the hub."""
OLLAMA, HUB_FILE = "ollama:", "hf:"
"""Beginnings of the names of GGUF files that are in ollama's store, and on the hub."""
LISTING, SHOWN_NAMES = "edgeinfer plan --list", 4
"""The command that lists the built-in shapes, and how many names a message has."""
RUNNABLE = ("Give a GGUF file, the directory of a checkpoint or bundle, ollama:NAME, an id on the hub such as "
            f"owner/name, or a known name such as {DEMO} or {next(iter(KNOWN_NAMES))}; 'edgeinfer models' lists "
            "those on this machine.")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)


def demo_path() -> Path:
    """Return the bundle that is embedded in the package."""
    return Path(__file__).parents[1] / "demo" / "bundle"


def is_hub_id(name: str) -> bool:
    """Return whether this can only mean a model of the hub: a path into a directory that is there does not."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).parent.is_dir()


def is_model(path: Path) -> bool:
    """Return whether the directory looks like a bundle or a checkpoint."""
    return is_bundle(path) or (path / "config.json").is_file()


def unknown_name(name: str) -> str:
    """Return the message for a name that means no model that can be run."""
    from ..graph import builtin_shapes

    shapes = builtin_shapes()
    if shape := shapes.get(name.lower()):
        return _shape_only(name, shape)
    if missing := missing_path(name):
        return missing
    typed, here = name.lower(), (DEMO, *KNOWN_NAMES, *_models_in(Path()))
    near = [*_ollamas(name), *_nearest(typed, here, 0.7)][:SHOWN_NAMES] or _nearest(typed, (*here, *shapes), 0.5)
    return unknown_model(name, near, RUNNABLE)


def missing_path(name: str) -> str:
    """Return the message for a path at which there is nothing; empty for a possible name."""
    path = Path(name).expanduser()
    if path.suffix not in (".json", ".gguf", ".safetensors") and "/" not in name and path.name == name:
        return ""
    near = [str(path.parent / other) for other in _nearest(path.name.lower(), _models_in(path.parent), 0.6)]
    return f"There is no file or directory {name!r}{_did_you_mean(near) or '.'}"


def unknown_model(name: str, near: Sequence[str], remedy: str) -> str:
    """Return the message for a name that means no model: the nearest names, or the forms of MODEL."""
    return f"Unknown model {name!r}{_did_you_mean(near) or f'. {remedy}'}"


def _did_you_mean(near: Sequence[str]) -> str:
    if not near:
        return ""
    *others, last = map(repr, near)
    return f"; did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"


def _nearest(typed: str, known: Iterable[str], cutoff: float) -> list[str]:
    by_lower = {name.lower(): name for name in known}
    return [by_lower[key] for key in similar(typed, by_lower, n=3, cutoff=cutoff)]


def _ollamas(name: str) -> list[str]:
    """Names in ollama's store, as `run` takes them, of models that are called so, or nearly, but for owner and tag."""
    from ..converters import ollama_models

    try:
        called = [model.name for model in ollama_models() if not model.problem]
    except OSError:
        return []
    bare = {other: other.removeprefix(OLLAMA).partition(":")[0].rpartition("/")[2].lower() for other in called}
    typed = name.partition(":")[0].lower()
    closest = {typed} & {*bare.values()} or _nearest(typed, bare.values(), 0.8)
    return [other for other, own in bare.items() if own in closest]


def _shape_only(name: str, shape: Shape) -> str:
    """Return the message for a model of which only the shape is known, where its weights are wanted."""
    if shape.family:
        return (f"{name!r} is a built-in shape for 'edgeinfer plan {name}' and 'edgeinfer estimate {name}'; edgeinfer "
                f"does not run models of its family, {shape.family}.")
    return (f"{name!r} is a built-in shape without weights, for 'edgeinfer plan {name}' and 'edgeinfer estimate "
            f"{name}'. To run the model, give its GGUF file, its checkpoint or its id on the hub, {shape.source}.")


def _models_in(parent: Path) -> list[str]:
    """Return the names of GGUF files, bundles and checkpoints in a directory."""
    try:
        return [path.name for path in parent.iterdir() if path.suffix == ".gguf" or (path.is_dir() and is_model(path))]
    except OSError:
        return []
