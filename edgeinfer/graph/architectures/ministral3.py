"""Ministral 3 (Mistral AI): Mistral with YaRN, whose queries grow with their position beyond the training's context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import CheckpointError
from ..config import ModelConfig, RopeConfig
from ..families.family import Family
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import forward
from .mistral import MISTRAL_3

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"vocab_size": 131072, "num_attention_heads": 32, "max_position_embeddings": 262144,
            "num_key_value_heads": 8, "head_dim": 128, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
"""The rotation of configs that say none."""
_OWN = ("llama_4_scaling_beta", "max_position_embeddings")
"""Keys of the rotation's section that are not part of YaRN."""


def read(c: ConfigReader) -> ModelConfig:
    """Scores of a query at position p times 1 + beta log(1 + floor(p / original_max_position_embeddings))."""
    if not c.has("rope_scaling") and not c.has("rope_parameters"):
        c = c.instead(rope_parameters=YARN)
    c, scale = _query_scale(c)
    window, layers = c.integer("sliding_window", None), c.integer("num_hidden_layers", high=2**12)
    return read_decoder(c, DEFAULTS, windows=(window,) * layers if window else (), local_rope=scale,
                        ropes=(1,) * layers)


def _query_scale(c: ConfigReader) -> tuple[ConfigReader, RopeConfig]:
    """Return the config with YaRN's keys alone in its sections of RoPE, and the factor of queries."""
    found, plain = set(), {}
    for name in ("rope_scaling", "rope_parameters"):
        if section := c.section(name):
            found.add(RopeConfig(
                kind="query_scale", factor=section.number("llama_4_scaling_beta"),
                original_max_position_embeddings=section.integer("original_max_position_embeddings", high=2**27)))
            fields: dict[str, Any] = section.items()
            plain[name] = {key: value for key, value in fields.items() if key not in _OWN}
    if not found:
        raise CheckpointError(f"{c.where}: the section of RoPE is empty, and lacks 'llama_4_scaling_beta'; download "
                              "the file again.")
    if len(found) > 1:
        raise CheckpointError(f"{c.where}: rope_scaling and rope_parameters disagree; keep the one that is right.")
    return c.instead(**plain), found.pop()


def _fields(m: GgufMetadata) -> dict[str, Any]:
    kind, _ = m.scaling()
    if kind != "yarn":
        raise m.unsupported("attention.temperature_scale", m.get("attention.temperature_scale"),
                            f"with {m.prefix}rope.scaling.type {kind} it must be 0")
    return {}


GGUF = replace(MISTRAL_3, when=lambda m: bool(m.get("attention.temperature_scale")), fields=_fields)
FAMILY = Family((GGUF,), neighbours=True)
