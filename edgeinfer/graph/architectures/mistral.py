"""Mistral (arXiv 2310.06825): Llama whose queries may see a sliding window of the context."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..families.family import Family, Gguf, Seeing
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from . import llama
from .llama import forward

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2}


def read(c: ConfigReader) -> ModelConfig:
    """One window for all layers; a null `sliding_window` means none, an absent one 4096."""
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096)
    layers = c.integer("num_hidden_layers", high=2**12)
    return read_decoder(c, DEFAULTS, windows=(window,) * layers if window else ())


def _has_window(m: GgufMetadata) -> bool:
    """A window that some context does not fit in; a file with experts is not a Mistral."""
    window, longest = m.get("attention.sliding_window"), m.config.get("max_position_embeddings", math.inf)
    return (not m.get("expert_count") and type(window) is int and isinstance(longest, int | float)
            and 0 < window < min(longest, 2**31))


def _stretched(m: GgufMetadata, section: dict[str, Any]) -> dict[str, Any]:
    """YaRN's mscale_all_dim, which files have as a multiplier beside an mscale of 1, and the factor of queries."""
    if m.number("rope.scaling.yarn_attn_factor", 1.0) != 1:
        raise m.unsupported("rope.scaling.yarn_attn_factor", m.get("rope.scaling.yarn_attn_factor"),
                            "only 1 is supported")
    multiplier = m.number("rope.scaling.yarn_log_multiplier", 1.0)
    beta = m.number("attention.temperature_scale", 0.0, above=-1.0)
    rest = {key: value for key, value in section.items() if key != "attention_factor"}
    return {**rest, "mscale": 1.0, "mscale_all_dim": multiplier, **({"llama_4_scaling_beta": beta} if beta else {})}


MISTRAL_3 = Gguf("mistral3", fixed_fields={"sliding_window": None}, ignored=("attention.temperature_scale",),
                 stretch=_stretched)
"""Mistral Small 3's, which has no factors of queries, and Ministral 3's."""
FAMILY = Family((replace(llama.GGUF, when=_has_window,
                         fields=lambda m: {"sliding_window": m.get("attention.sliding_window")}), MISTRAL_3),
                neighbours=True, seeing=(Seeing("mistral3"),))
