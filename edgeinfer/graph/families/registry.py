"""The registry of model families: the files of graph/architectures, found by name and imported when asked for."""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from .. import architectures

if TYPE_CHECKING:
    from .family import Family, Gguf, Seeing
    from .pre_tokenizer import PreTokenizer



def supported_architectures() -> list[str]:
    """Return the `model_type` of every architecture that has a file, sorted."""
    return list(_names(tuple(architectures.__path__)))


def architecture_module(model_type: str) -> ModuleType:
    """Return the module of an architecture, one of `supported_architectures`."""
    return importlib.import_module(f"{architectures.__name__}.{model_type}")


def family_of(model_type: object) -> Family:
    """Return the names of a family's parts in files; the usual names for a family that is unknown or has none."""
    from .family import Family

    known = isinstance(model_type, str) and model_type in _names(tuple(architectures.__path__))
    family = getattr(architecture_module(str(model_type)), "FAMILY", None) if known else None
    return family if isinstance(family, Family) else Family()


def gguf_architectures() -> dict[str, tuple[tuple[str, Gguf], ...]]:
    """Return the families that read each architecture of GGUF, by `model_type`: those that ask about a file first."""
    return _gguf(tuple(architectures.__path__))


def gguf_of(name: object) -> Gguf | None:
    """Return the entry of a GGUF architecture independent of any file; None if it is unknown."""
    found = gguf_architectures().get(name) if isinstance(name, str) else None
    return found[-1][1] if found else None


def seeing_models() -> dict[str, str]:
    """Return the `model_type` of each model that also sees or hears, and of the text model inside."""
    return {name: model_type for name, (model_type, _) in _wrappers(tuple(architectures.__path__)).items()}


def wrapper_of(name: object) -> tuple[str, Seeing] | None:
    """Return the `model_type` of the text model inside a model that also sees or hears; None for a text model."""
    path = tuple(architectures.__path__)
    return None if not isinstance(name, str) or name in _names(path) else _wrappers(path).get(name)


def text_models() -> dict[str, str]:
    """Return the families by the names that the inner configs of such models have for them."""
    return {seeing.text: model_type for model_type, seeing in _wrappers(tuple(architectures.__path__)).values()
            if seeing.text}


def pre_tokenizers() -> dict[str, PreTokenizer]:
    """Return the pre-tokenizers that single families have, by name."""
    return {name: words for model_type in supported_architectures()
            for name, words in family_of(model_type).pre_tokenizers.items()}


@lru_cache(maxsize=8)
def _names(path: tuple[str, ...]) -> tuple[str, ...]:
    files = (name for folder in path for name in os.listdir(folder))
    return tuple(sorted(name[:-3] for name in files if name.endswith(".py") and name != "__init__.py"))


@lru_cache(maxsize=8)
def _gguf(path: tuple[str, ...]) -> dict[str, tuple[tuple[str, Gguf], ...]]:
    found: dict[str, list[tuple[str, Gguf]]] = {}
    for model_type in _names(path):
        for gguf in family_of(model_type).gguf:
            found.setdefault(gguf.name, []).append((model_type, gguf))
    return {name: tuple(sorted(rows, key=lambda row: row[1].when is None)) for name, rows in sorted(found.items())}


@lru_cache(maxsize=8)
def _wrappers(path: tuple[str, ...]) -> dict[str, tuple[str, Seeing]]:
    return {seeing.name: (model_type, seeing) for model_type in _names(path)
            for seeing in family_of(model_type).seeing}
