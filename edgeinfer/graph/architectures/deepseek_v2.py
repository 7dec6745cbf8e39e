"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention, and a mixture of experts with shared ones."""

from __future__ import annotations

from typing import Any

from ..builder.latent import forward, read_latent, read_routed
from ..config import ModelConfig
from ..families.family import SOFTMAX, Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.reader import ConfigReader

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {
    "vocab_size": 102400, "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1,
    "eos_token_id": 2, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
}


def read(c: ConfigReader) -> ModelConfig:
    """Experts are chosen of all, or of the groups whose best score is largest; their weights are softmax's own."""
    c.own_code()
    method = c.choice("topk_method", c.get("topk_method", "greedy"), ("greedy", "group_limited_greedy"))
    c.choice("scoring_func", c.get("scoring_func", "softmax"), ("softmax",))
    for name in ("norm_topk_prob", "mlp_bias"):
        if c.flag(name):
            raise c.unsupported(name, True, "published models of the family have it off")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):
        c.get(name)  # of training
    if c.integer("moe_layer_freq", 1) != 1:
        raise c.unsupported("moe_layer_freq", c.get("moe_layer_freq"), "only 1 is supported")
    first = c.integer("first_k_dense_replace", 0, low=0)
    dense = tuple(range(min(first, c.integer("num_hidden_layers", high=2**12))))
    groups = {"groups": 1, "active_groups": 1} if method == "greedy" else {}
    return read_latent(c, DEFAULTS, read_routed(c, DEFAULTS, dense, normalise=False, **groups))


# -- files, of DeepSeek-V3 and GLM-4.7-Flash too -----------------------------------------------------------------------

SIGMOID = 2
_LOG_FACTOR = 0.1
"""Factor of mscale_all_dim in yarn_log_multiplier."""


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Newer files describe attention as that over latents, and heads apart."""
    rotary, sigmoid = m.get("rope.dimension_count"), m.get("expert_gating_func") == SIGMOID
    key, value = (m.get(f"attention.{what}_length_mla") or m.get(f"attention.{what}_length")
                  for what in ("key", "value"))
    nope = key - rotary if isinstance(key, int) and isinstance(rotary, int) else None
    fields = {
        **routed_fields(m), "num_key_value_heads": None, "head_dim": None,
        "kv_lora_rank": m.get("attention.kv_lora_rank"), "q_lora_rank": m.get("attention.q_lora_rank"),
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rotary, "v_head_dim": value}
    if not sigmoid and fields["n_group"] > 1:
        fields["topk_method"] = "group_limited_greedy"
    return fields


def routed_fields(m: GgufMetadata) -> dict[str, Any]:
    """Layers and experts; blocks after the last layer draft."""
    return {
        "num_hidden_layers": m.layers_without_drafts(),
        "first_k_dense_replace": m.get("leading_dense_block_count") or 0, "n_routed_experts": m.get("expert_count"),
        "num_experts_per_tok": m.get("expert_used_count"), "n_shared_experts": m.get("expert_shared_count"),
        "moe_intermediate_size": m.get("expert_feed_forward_length"),
        "routed_scaling_factor": m.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(m.get("expert_weights_norm")), "n_group": m.get("expert_group_count") or 1,
        "topk_group": m.get("expert_group_used_count") or 1}


def _rotation(m: GgufMetadata) -> dict[str, Any]:
    """YaRN, whose stretch of queries and keys a file has as a logarithm's multiplier; cosines have no factor."""
    kind, factor = m.scaling()
    gating = m.get("expert_gating_func")
    if gating not in (None, 0, SOFTMAX, SIGMOID):
        raise m.unsupported("expert_gating_func", gating, "only 1 (softmax) and 2 (sigmoid) are supported")
    r, scaling = m.reader, m.prefix + "rope.scaling."
    original = r.integer(scaling + "original_context_length", m.config.get("max_position_embeddings"))
    multiplier = r.number(scaling + "yarn_log_multiplier", 0.0, above=-1.0)
    if kind == "none":
        return {}
    if kind != "yarn":
        raise r.unsupported(scaling + "type", kind, "with latent attention it is yarn or none")
    every = round(multiplier / _LOG_FACTOR, 6)
    return {"rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                             **({"mscale": every, "mscale_all_dim": every} if every else {"attention_factor": 1.0})}}


GGUF = Gguf("deepseek2", fields=_fields, rotation=_rotation, ignored=("attention.value_length",))
TENSORS = {"self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
           "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
           "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
           "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
FAMILY = Family((GGUF,), TENSORS)
