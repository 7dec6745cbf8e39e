"""LFM2-MoE (Liquid AI, arXiv 2511.23404): LFM2 with a mixture of experts in all layers but the first."""

from __future__ import annotations

from typing import Any

from ..builder.builder import GraphBuilder
from ..builder.moe import count_experts, with_dense_layers
from ..config import ExpertsConfig, ModelConfig
from ..families.family import ExpertModules, Family, Gguf, GgufExperts
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.reader import ConfigReader
from .lfm2 import TENSORS, ffn, gguf_fields, mix, read_lfm2


def read(c: ConfigReader) -> ModelConfig:
    """Experts are chosen by sigmoids, plus a bias where `use_expert_bias` says so."""
    layers = c.integer("num_hidden_layers", high=2**12)
    total, active = count_experts(c, "num_experts", 32, 4)
    dense = tuple(range(min(layers, c.integer("num_dense_layers", 2, low=0))))
    experts = ExpertsConfig(
        total, active, c.integer("moe_intermediate_size", 1792, high=2**20), scores="sigmoid",
        normalise=c.flag("norm_topk_prob", True), scale=c.number("routed_scaling_factor", 1.0),
        choice_bias=c.flag("use_expert_bias", True))
    return read_lfm2(c, ["full_attention"] * layers, experts=with_dense_layers(experts, dense, layers))


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        x = mix(g, c, x, i)
        if not c.experts or i in c.experts.dense_layers:
            x = ffn(g, x, i)
            continue
        name, hf = f"layers.{i}.", f"model.layers.{i}."
        h = g.rms_norm(x, name + "ffn_norm", hf + "ffn_norm.weight")
        x = g.experts(h, g.route(h, name, hf + "mlp."), name, hf + "mlp.", residual=x)
    return g.build(g.logits(x, "model.embedding_norm.weight", "lm_head.weight"))


def _fields(m: GgufMetadata) -> dict[str, Any]:
    has = any(name.endswith("exp_probs_b.bias") for name in m.tensors) or not m.tensors
    return {**gguf_fields(m), "num_dense_layers": m.get("leading_dense_block_count") or 0, "use_expert_bias": has}


SIGMOID = 2
"""llama.cpp's number for experts that are scored by sigmoids."""
EXPERTS = GgufExperts(size="moe_intermediate_size", normalise=True, scores={SIGMOID: "sigmoid"})
FAMILY = Family(
    (Gguf("lfm2moe", fields=_fields, tied=True, experts=EXPERTS),),
    {**TENSORS, "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}, experts=ExpertModules(
        "feed_forward", ("w1", "w3", "w2"), "feed_forward.gate", choice_bias="feed_forward.expert_bias"))
