"""Gemma 2 (arXiv 2408.00118): Gemma with norms on the way out, every second layer with a window, and soft caps."""

from __future__ import annotations

from typing import Any

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import NORMS_ON_THE_WAY_OUT, Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_sliding
from ..hf_config.reader import ConfigReader
from . import gemma

DEFAULTS = {**gemma.DEFAULTS, "num_key_value_heads": 4}


def read(c: ConfigReader) -> ModelConfig:
    """A null cap means none, an absent one the published."""
    caps = {ours: 0.0 if c.is_null(name) else c.number(name, default)
            for ours, name, default in (("attention_softcap", "attn_logit_softcapping", 50.0),
                                        ("logits_softcap", "final_logit_softcapping", 30.0))}
    window = None if c.is_null("sliding_window") else c.integer("sliding_window", 4096)
    c.get("sliding_window_size")  # an older name beside the newer one
    windows = read_sliding(c, window, lambda i: i % 2 == 0 and window is not None)
    scale = c.number("query_pre_attn_scalar", 256.0) ** -0.5
    return gemma.read_gemma(c, DEFAULTS, windows=windows, attention_scale=scale, **caps)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    return llama_like(g, c, gemma.layer, gemma.norm("model.norm", c.hidden_size), sandwich=True)


def _fields(m: GgufMetadata) -> dict[str, Any]:
    return gemma.gguf_fields(m, 46) | {"attn_logit_softcapping": m.get("attn_logit_softcapping")}


FAMILY = Family((Gguf("gemma2", fields=_fields, fixed_fields=gemma.GELU, tied=True),), NORMS_ON_THE_WAY_OUT,
                norms_plus_one=True)
