"""GGUF files that ollama's own converter wrote: their names as llama.cpp has them.

Most files in ollama's store are llama.cpp's. Its own have a few other names, and hold what sees pictures beside the
text model, which llama.cpp keeps in a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from edgeinfer.errors import CheckpointError

_T = TypeVar("_T")
_KEY = "general.architecture"
ARCHITECTURES = {"gptoss": "gpt-oss", "qwen25vl": "qwen2vl"}
"""ollama's names of architectures, and llama.cpp's."""
_SECTIONS = {"rope.mrope_section": "rope.dimension_sections", "mrope_sections": "rope.dimension_sections"}
"""Names of the shares of a rotation for time, height and width of a picture; of text all three are the same."""
_KEYS = {"gemma3": {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"},
         **dict.fromkeys(("qwen25vl", "qwen3vl", "qwen3vlmoe"), _SECTIONS)}
_TENSORS = {
    "gptoss": ((r"(blk\.\d+)\.attn_out\.", r"\1.attn_output."), (r"(blk\.\d+)\.ffn_norm\.", r"\1.post_attention_norm."),
               (r"(blk\.\d+)\.attn_sinks$", r"\1.attn_sinks.weight")),
    "gemma4": ((r"(blk\.\d+)\.ffn_gate_inp\.per_expert_scale$", r"\1.ffn_down_exps.scale"),
               (r"(blk\.\d+)\.layer_scalar$", r"\1.layer_output_scale.weight")),
}
_SEEING = ("gemma3", "gemma4")
"""Architectures whose files may hold what sees and hears without a field that says so."""
_SENSES = re.compile(r"(v|a|mm)\..+")
_SENSES_KEYS = re.compile(r"(vision|audio|mm)\..+")


def as_llama_cpp(fields: Mapping[str, Any], tensors: Mapping[str, _T]) -> tuple[dict[str, Any], dict[str, _T]]:
    """Return the fields and tensors of a header by llama.cpp's names, those of pictures and sounds left out."""
    name = fields.get(_KEY)
    if not isinstance(name, str):  # refused by its value (gguf_config.py)
        return dict(fields), dict(tensors)
    own = ARCHITECTURES.get(name, name)
    prefix, keys = f"{name}.", _KEYS.get(name, {})
    inner = {key: key.removeprefix(prefix) for key in fields if key.startswith(prefix)}
    seeing = own in _SEEING or any(map(_SENSES_KEYS.fullmatch, inner.values()))
    if not (own != name or name in _KEYS or name in _TENSORS or seeing):
        return dict(fields), dict(tensors)
    found = _once((f"{own}.{keys.get(inner[key], inner[key])}" if key in inner else key, value)
                  for key, value in fields.items() if not _SENSES_KEYS.fullmatch(inner.get(key, "")))
    found[_KEY] = own
    if name == "gptoss" and "gpt-oss.rope.scaling.factor" in found:  # a rotation that its files do not name
        found.setdefault("gpt-oss.rope.scaling.type", "yarn")
    kept = {tensor: value for tensor, value in tensors.items() if not (seeing and _SENSES.fullmatch(tensor))}
    return found, _once((_renamed(tensor, name), value) for tensor, value in kept.items())


def _once(pairs: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    found: dict[str, _T] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"A GGUF file has {name!r:.80} twice, by ollama's name and by llama.cpp's; "
                                  "get another.")
        found[name] = value
    return found


def _renamed(tensor: str, name: str) -> str:
    for pattern, instead in _TENSORS.get(name, ()):
        tensor = re.sub(pattern, instead, tensor)
    return tensor
