"""Qwen3.5-MoE (Alibaba): Qwen3.5's layers with a mixture of experts and, beside it, one that all tokens go through."""

from __future__ import annotations

from ..builder.builder import GraphBuilder
from ..builder.moe import moe, read_experts
from ..config import ModelConfig
from ..families.family import Family, Gguf, GgufExperts, Seeing
from ..families.gguf_hybrid import delta_fields
from ..graph import Graph
from ..hf_config.reader import ConfigReader
from .gemma import norm
from .qwen3_5_text import DEFAULTS, PICTURES, TENSORS, mix, order, read_hybrid


def read(c: ConfigReader) -> ModelConfig:
    """The weights of a token's experts add up to 1."""
    size = c.integer("moe_intermediate_size", 512, high=2**20)
    shared = c.integer("shared_expert_intermediate_size", 512, high=2**20)
    experts = read_experts(c, "num_experts", 256, 8, size, shared_size=shared)
    if not c.flag("norm_topk_prob", True):
        raise c.unsupported("norm_topk_prob", False, "weights of a token's experts add up to 1 in this family")
    plain = c if c.has("intermediate_size") else c.instead(intermediate_size=size)
    return read_hybrid(plain, {**DEFAULTS, "num_key_value_heads": 2}, experts=experts)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        x = moe(g, c, mix(g, c, x, i), i, norm=norm(f"model.layers.{i}.post_attention_layernorm", c.hidden_size))
    return g.build(g.logits(x, norm("model.norm", c.hidden_size), "lm_head.weight"))


EXPERTS = GgufExperts(size="moe_intermediate_size", shared_size="shared_expert_intermediate_size", normalise=True)
FAMILY = Family(
    (Gguf("qwen35moe", fields=delta_fields, turns="share", ignored=PICTURES, experts=EXPERTS),), TENSORS, order=order,
    further_tokens=True, norms_plus_one=True, seeing=(Seeing("qwen3_5_moe"),))
