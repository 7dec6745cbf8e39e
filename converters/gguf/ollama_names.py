"""GGUF files that ollama's own converter wrote: their names as llama.cpp has them.

Most files in ollama's store are llama.cpp's. Its own have a few other names, and hold the vision part beside the
text model, which llama.cpp keeps in a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import Gguf, Ollama, gguf_architectures, gguf_of

_T = TypeVar("_T")
_KEY = "general.architecture"
_SAME = Ollama()
_SENSES = re.compile(r"(v|a|mm)\..+")
_SENSES_KEYS = re.compile(r"(vision|audio|mm)\..+")


def as_llama_cpp(fields: Mapping[str, Any], tensors: Mapping[str, _T]) -> tuple[dict[str, Any], dict[str, _T]]:
    """Return the fields and tensors of a header by llama.cpp's names, those of pictures and sounds left out."""
    name = fields.get(_KEY)
    if not isinstance(name, str):  # refused by its value (config.py)
        return dict(fields), dict(tensors)
    gguf, ollama = _known(name)
    own, prefix, keys = gguf.name if gguf else name, f"{name}.", ollama.keys
    inner = {key: key.removeprefix(prefix) for key in fields if key.startswith(prefix)}
    seeing = bool(gguf and gguf.sees) or any(map(_SENSES_KEYS.fullmatch, inner.values()))
    if own == name and ollama == _SAME and not seeing:
        return dict(fields), dict(tensors)
    found = _once((f"{own}.{keys.get(inner[key], inner[key])}" if key in inner else key, value)
                  for key, value in fields.items() if not _SENSES_KEYS.fullmatch(inner.get(key, "")))
    found[_KEY] = own
    if ollama.stretched and f"{own}.rope.scaling.factor" in found:  # a rotation that its files do not name
        found.setdefault(f"{own}.rope.scaling.type", ollama.stretched)
    kept = {tensor: value for tensor, value in tensors.items() if not (seeing and _SENSES.fullmatch(tensor))}
    return found, _once((_renamed(tensor, ollama), value) for tensor, value in kept.items())


def _known(name: str) -> tuple[Gguf | None, Ollama]:
    """Return the entries of an architecture by ollama's name or by llama.cpp's."""
    for rows in gguf_architectures().values():
        gguf = rows[-1][1]
        if gguf.ollama and (gguf.ollama.name or gguf.name) == name:
            return gguf, gguf.ollama
    return gguf_of(name), _SAME


def _once(pairs: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    found: dict[str, _T] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"A GGUF file has {name!r:.80} twice, by ollama's name and by llama.cpp's; "
                                  "get another.")
        found[name] = value
    return found


def _renamed(tensor: str, ollama: Ollama) -> str:
    for pattern, instead in ollama.tensors:
        tensor = re.sub(pattern, instead, tensor)
    return tensor
