"""Qwen2-MoE (arXiv 2407.10671): Qwen2 with a mixture of experts and, beside it, one that all tokens go through."""

from __future__ import annotations

from ..builder.moe import read_experts
from ..config import ExpertsConfig, ModelConfig
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
    return read_decoder(c, DEFAULTS, attention_bias=c.flag("qkv_bias", True), windows=windows,
                        experts=qwen_experts(c, 60, 4, 1408, 5632))


def qwen_experts(c: ConfigReader, total: int, active: int, size: int, shared: int = 0, normalise: bool = False
                 ) -> ExpertsConfig | None:
    """Experts by Qwen's names, with a family's defaults; `shared` is the size of the one that all tokens go through."""
    return read_experts(c, "num_experts", total, active, c.integer("moe_intermediate_size", size, high=2**20),
                        normalise=c.flag("norm_topk_prob", normalise), shared_size=shared and c.integer(
                            "shared_expert_intermediate_size", shared, high=2**20))


FAMILY = Family((Gguf("qwen2moe", experts=GgufExperts(
    size="moe_intermediate_size", shared_size="shared_expert_intermediate_size", normalise=False)),))
