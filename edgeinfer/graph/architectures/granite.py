"""Granite 3 (IBM): Llama with four multipliers, which are all folded.

The stream runs 1 / residual_multiplier times as large, so that addends need no factor: norms do not see
this but for their epsilon, and the embedding's multiplier grows by it.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import forward

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}


def read(c: ConfigReader) -> ModelConfig:
    """Scores times `attention_multiplier`, logits divided by `logits_scaling`."""
    bias, residual = c.flag("attention_bias"), c.number("residual_multiplier", 1.0)
    eps = c.number("rms_norm_eps", 1e-6, high=1.0) / residual**2
    return read_decoder(
        c.instead(rms_norm_eps=eps), DEFAULTS, attention_bias=bias, attention_output_bias=bias,
        mlp_bias=c.flag("mlp_bias"), attention_scale=c.number("attention_multiplier", 1.0),
        embedding_scale=c.number("embedding_multiplier", 1.0) / residual,
        logits_scale=1 / c.number("logits_scaling", 1.0))


_MULTIPLIERS = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
                "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"}


def gguf_fields(m: GgufMetadata) -> dict[str, Any]:
    """The multipliers; without one for scores they are divided as in Llama."""
    said = {ours: value for ours, key in _MULTIPLIERS.items() if (value := m.get(key))}
    return {"attention_multiplier": m.size("head_dim") ** -0.5} | said


FAMILY = Family((Gguf("granite", fields=gguf_fields),), neighbours=True)
