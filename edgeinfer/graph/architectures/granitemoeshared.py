"""Granite 3.1 MoE and 4 (IBM): Granite's MoE model with an FFN beside it that all tokens go through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..families.family import Family
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.reader import ConfigReader
from . import granite, granitemoe
from .mixtral import forward

__all__ = ["FAMILY", "forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """Read the config as granitemoe's; `shared_intermediate_size` is 0 if there is no such FFN."""
    config, size = granitemoe.read(c), c.integer("shared_intermediate_size", 0, low=0, high=2**20)
    assert config.experts
    return replace(config, experts=replace(config.experts, shared_size=size, shared_gate=False))


SHARED = "expert_shared_feed_forward_length"


def _fields(m: GgufMetadata) -> dict[str, Any]:
    return {**granite.gguf_fields(m), "shared_intermediate_size": m.get(SHARED)}


FAMILY = Family(
    (replace(granitemoe.GGUF, when=lambda m: bool(m.get(SHARED)), fields=_fields),), neighbours=True,
    experts=replace(granitemoe.EXPERTS, shared=("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight")))
