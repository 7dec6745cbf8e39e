"""DeepSeek-V3, R1 and Moonlight (arXiv 2412.19437): V2's attention, experts chosen by sigmoids with a bias."""

from __future__ import annotations

from dataclasses import replace

from ..builder.latent import block, forward
from ..config import ModelConfig
from ..families.family import Family
from ..hf_config.reader import ConfigReader
from .deepseek_v2 import GGUF, SIGMOID, TENSORS
from .glm4_moe_lite import read_sigmoid

__all__ = ["FAMILY", "block", "forward", "read"]

DEFAULTS = {
    "vocab_size": 129280, "num_attention_heads": 128, "max_position_embeddings": 4096, "bos_token_id": 0,
    "eos_token_id": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4,
}


def read(c: ConfigReader) -> ModelConfig:
    """Read the config as GLM-4.7-Flash's, with other sizes."""
    c.own_code()
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):
        c.get(name)  # of training
    if c.integer("moe_layer_freq", 1) != 1:
        raise c.unsupported("moe_layer_freq", c.get("moe_layer_freq"), "only 1 is supported")
    return read_sigmoid(c, DEFAULTS)


FAMILY = Family((replace(GGUF, when=lambda m: m.get("expert_gating_func") == SIGMOID),), TENSORS, further_tokens=True)
