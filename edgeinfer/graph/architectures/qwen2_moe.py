"""Qwen2-MoE (arXiv 2407.10671): Qwen2 with a mixture of experts and, beside it, one that all tokens go through."""

from __future__ import annotations

from ..common import read_decoder
from ..config import ModelConfig
from ..mixture import read_experts
from ..reader import ConfigReader
from .mixtral import forward

__all__ = ["forward", "read"]

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 16}


def read(c: ConfigReader) -> ModelConfig:
    """`qkv_bias` puts a bias on queries, keys and values."""
    if c.flag("use_sliding_window"):
        raise c.unsupported("use_sliding_window", True, "published models of the family have no window")
    for name in ("sliding_window", "max_window_layers", "layer_types"):
        c.get(name)  # which mean nothing without
    experts = read_experts(c, "num_experts", 60, 4, c.integer("moe_intermediate_size", 1408, high=2**20),
                           normalise=c.flag("norm_topk_prob"),
                           shared_size=c.integer("shared_expert_intermediate_size", 5632, high=2**20))
    return read_decoder(c, DEFAULTS, attention_bias=c.flag("qkv_bias", True), experts=experts)
