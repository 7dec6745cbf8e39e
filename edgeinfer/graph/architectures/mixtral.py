"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..builder.blocks import llama_like
from ..builder.moe import moe, read_experts
from ..config import ModelConfig
from ..families.family import ExpertModules, Family, GgufExperts
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from . import llama
from .llama import attend

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def read(c: ConfigReader) -> ModelConfig:
    """One window for all layers; the weights of a token's experts add up to 1."""
    window, layers = c.integer("sliding_window", None), c.integer("num_hidden_layers", high=2**12)
    experts = read_experts(c, "num_local_experts", 8, 2, c.integer("intermediate_size", high=2**20))
    return read_decoder(c, DEFAULTS, windows=(window,) * layers if window else (), experts=experts)


forward = partial(llama_like, block=lambda g, c, x, i: moe(g, c, attend(g, c, x, i), i))
FAMILY = Family(
    (replace(llama.GGUF, when=lambda m: bool(m.get("expert_count")), experts=GgufExperts("num_local_experts")),),
    neighbours=True,
    experts=ExpertModules("block_sparse_moe", ("w1", "w3", "w2"), "block_sparse_moe.gate"))
