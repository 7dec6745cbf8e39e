"""GLM-4.5, 4.6 and 4.7 (Z.ai): half of each head turns, experts are chosen by sigmoids with a bias."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.moe import moe
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from .deepseek_v2 import SIGMOID, TENSORS, routed_fields
from .glm4_moe_lite import sigmoid_experts
from .llama import attend

DEFAULTS = {
    "vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "partial": (("partial_rotary_factor",), 0.5), "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on queries, keys and values; with `use_qk_norm` each head of q and k has a norm."""
    return read_decoder(c, DEFAULTS, attention_bias=c.flag("attention_bias"), experts=sigmoid_experts(c, DEFAULTS),
                        head_norm=c.flag("use_qk_norm"))


def block(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """One layer."""
    return moe(g, c, attend(g, c, x, i, qk_norm=c.head_norm), i)


def _fields(m: GgufMetadata) -> dict[str, Any]:
    gating = m.get("expert_gating_func")
    if gating not in (None, 0, SIGMOID):
        raise m.unsupported("expert_gating_func", gating, "only 2 (sigmoid) is supported")
    return {**routed_fields(m), "use_qk_norm": "blk.0.attn_q_norm.weight" in m.tensors}


forward = partial(llama_like, block=block)
FAMILY = Family((Gguf("glm4moe", fields=_fields, rotated="share"),),
                {**TENSORS, "post_attention_layernorm": "post_attention_norm"}, further_tokens=True)
