"""Qwen2-MoE (arXiv 2407.10671): Qwen2 with a mixture of experts and, beside it, one that all tokens go through."""

from __future__ import annotations

from ..builder.moe import read_experts
from ..config import ModelConfig
from ..families.family import Family, Gguf, GgufExperts
from ..hf_config.common import read_decoder, read_sliding
from ..hf_config.reader import ConfigReader
from .mixtral import forward

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 16}


def read(c: ConfigReader) -> ModelConfig:
    """`qkv_bias` puts a bias on queries, keys and values; every second layer below `max_window_layers` has a window."""
    use, below = c.flag("use_sliding_window"), c.integer("max_window_layers", 28, low=0)
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096, low=0)
    windows = read_sliding(c, window if use else None, lambda i: use and bool(window) and i % 2 == 0 and i < below)
    experts = read_experts(c, "num_experts", 60, 4, c.integer("moe_intermediate_size", 1408, high=2**20),
                           normalise=c.flag("norm_topk_prob"),
                           shared_size=c.integer("shared_expert_intermediate_size", 5632, high=2**20))
    return read_decoder(c, DEFAULTS, attention_bias=c.flag("qkv_bias", True), windows=windows, experts=experts)


FAMILY = Family((Gguf("qwen2moe", experts=GgufExperts(
    size="moe_intermediate_size", shared_size="shared_expert_intermediate_size", normalise=False)),))
