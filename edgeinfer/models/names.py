"""Names of models: the demo, short names, names in stores, ids on the hub; and suggestions for a wrong one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
"""Beginnings of the names of GGUF files that lie in ollama's store, and on the hub."""
LISTING, SHOWN_NAMES = "edgeinfer plan --list", 4
"""The command that lists all names, and how many a message has."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)


def demo_path() -> Path:
    """Return the bundle that is embedded in the package."""
    return Path(__file__).parents[1] / "demo" / "bundle"


def is_hub_id(name: str) -> bool:
    """Return whether this can only mean a model of the hub: a path into a directory that is there does not."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).parent.is_dir()


def is_model(path: Path) -> bool:
    """Whether the directory looks like a bundle or a checkpoint."""
    return is_bundle(path) or (path / "config.json").is_file()


def unknown_name(name: str) -> str:
    """Return what to say of a name that means no model that can be run."""
    from ..graph import builtin_shapes

    shapes = builtin_shapes()
    if shape := shapes.get(name.lower()):
        return _shape_only(name, shape)
    path = Path(name).expanduser()
    candidates = {known: known for known in (DEMO, *KNOWN_NAMES)}
    if path.parent.is_dir():
        candidates |= {other: str(path.parent / other) for other in _model_directories(path.parent)}
    by_lower = {key.lower(): value for key, value in candidates.items()}
    typed = path.name.lower()
    near = difflib.get_close_matches(typed, by_lower, n=3, cutoff=0.7) or difflib.get_close_matches(
        typed, [*by_lower, *shapes], n=3, cutoff=0.5)
    found = _ollamas(name)[:SHOWN_NAMES] or [by_lower.get(key, key) for key in near]
    return unknown_model(name, "directory", found, (DEMO, *KNOWN_NAMES),
                         "the directory of a bundle or checkpoint, or an id on the hub such as owner/name")


def unknown_model(name: str, kind: str, near: Sequence[str], known: Sequence[str], what: str) -> str:
    """Return what to say of a name that means no model: the nearest names, or a few and where all are."""
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        hint = f"known are {', '.join(known[:SHOWN_NAMES])} and others, which '{LISTING}' lists; or give {what}."
    return f"Unknown model {name!r}: no such {kind} and no known name; {hint}"


def _ollamas(name: str) -> list[str]:
    """Names in ollama's store, as `run` takes them, of models that are called so but for owner and tag."""
    from ..converters import ollama_models

    try:
        called = [model.name for model in ollama_models() if not model.problem]
    except OSError:
        return []
    typed = name.partition(":")[0].lower()
    return [other for other in called if other.removeprefix(OLLAMA).partition(":")[0].rpartition("/")[2] == typed]


def _shape_only(name: str, shape: Shape) -> str:
    """Return what to say of a model of which only the shape is known, where its weights are wanted."""
    return (f"Of {name!r} only the shape is known here, without weights: 'edgeinfer plan {name}' and 'edgeinfer "
            f"estimate {name}' work. To run it, give its checkpoint's directory, or its id on the hub, {shape.source}.")


def _model_directories(parent: Path) -> list[str]:
    """Return the names of bundles and checkpoints in a directory."""
    try:
        entries = [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []
    return [path.name for path in entries if is_model(path)]
