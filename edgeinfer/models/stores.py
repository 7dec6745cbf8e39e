"""A bare name, looked up in the stores of other programs on this machine: ollama's, then LM Studio's."""

from __future__ import annotations

import re
from pathlib import Path

from edgeinfer import converters

from ..base.process import say
from ..errors import ModelNotFoundError
from .names import OLLAMA

_BARE = re.compile(r"[A-Za-z0-9][\w.\-]*(:[\w.\-]+)?", re.ASCII)
_said: set[str] = set()
"""Names whose store this process has reported."""


def in_stores(name: str) -> Path | None:
    """Return the GGUF file that a bare name such as ``llama3.2:1b`` has in a store, and say once which store that is.

    None if the name is a built-in shape or a path, or no store has it.

    Raises
    ------
    ModelNotFoundError
        Several models of LM Studio have this name.
    CheckpointError
        ollama has a model of this name that cannot be used.
    """
    if not _BARE.fullmatch(name):
        return None
    from ..graph import builtin_shapes

    if name.lower() in builtin_shapes():
        return None
    try:
        path, called = converters.ollama_file(name), f"ollama's model {OLLAMA}{name}"
    except ModelNotFoundError:
        found = _of_lm_studio(name)
        if len(found) > 1:
            raise ModelNotFoundError(f"LM Studio has {len(found)} models called {name!r}: "
                                     f"{', '.join(map(str, found))}; give the path of one.") from None
        if not found:
            return None
        path, called = found[0], f"LM Studio's model {found[0]}"
    if name not in _said:
        _said.add(name)
        say(f"Using {called}.")
    return path


def _of_lm_studio(name: str) -> list[Path]:
    """Files of LM Studio whose name, without ``.gguf`` and the type of the weights or with it, is this one."""
    typed, found = name.lower(), []
    for folder in converters.lm_studio_folders():
        for model in converters.models_below(folder, "lmstudio"):
            stem = model.path.name.removesuffix(".gguf")
            short = stem.replace(converters.gguf_type(stem), "").rstrip("-._") if converters.gguf_type(stem) else stem
            if model.format == "gguf" and not model.problem and typed in (stem.lower(), short.lower()):
                found.append(model.path)
    return found
