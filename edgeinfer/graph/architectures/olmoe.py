"""OLMoE (arXiv 2409.02060): Llama with a mixture of experts in each layer, q and k normed with all heads as one."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like
from ..builder.moe import moe, read_experts
from ..config import ModelConfig
from ..families.family import Family, Gguf, GgufExperts
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import attend

DEFAULTS = {"max_position_embeddings": 4096, "eos_token_id": 50279, "rms_norm_eps": 1e-5}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections of the attention; `clip_qkv` must be off."""
    bias = c.flag("attention_bias")
    size = c.integer("intermediate_size", 2048, high=2**20)
    experts = read_experts(c, "num_experts", 64, 8, size, normalise=c.flag("norm_topk_prob"))
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, experts=experts)


forward = partial(llama_like, block=lambda g, c, x, i: moe(g, c, attend(g, c, x, i, wide_norm=True), i))
FAMILY = Family((Gguf("olmoe", experts=GgufExperts(normalise=False)),))
