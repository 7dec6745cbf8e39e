"""GGUF's deepseek2: latent attention as metadata and tensors have it, of DeepSeek-V2, V3 and GLM-4.7-Flash."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from edgeinfer.graph import ConfigReader, ModelConfig, Source, Weight

NAME = "deepseek2"
LATENT = ("deepseek_v2", "deepseek_v3")
"""Ours of that name: scores by softmax or by sigmoids. GLM-4.7-Flash is calculated as DeepSeek-V3."""
KEYS = (
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
    "attention.value_length", "rope.dimension_count", "leading_dense_block_count", "expert_count",
    "expert_used_count", "expert_shared_count", "expert_feed_forward_length", "expert_weights_scale",
    "expert_weights_norm", "expert_gating_func", "expert_group_count", "expert_group_used_count",
)
"""Keys that `latent_fields` reads."""
_SIGMOID = 2
_LOG_FACTOR = 0.1
"""What mscale_all_dim is multiplied by in yarn_log_multiplier."""
_WEIGHT = re.compile(r"layers\.([0-9]+)\.([kv]_b)")


def model_type_of(get: Callable[[str], Any]) -> str:
    """Return our name of the architecture."""
    return LATENT[1] if get("expert_gating_func") == _SIGMOID else LATENT[0]


def latent_fields(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the fields of a config.json; newer files describe attention as that over latents, and heads apart."""
    rotary, sigmoid = get("rope.dimension_count"), get("expert_gating_func") == _SIGMOID
    key, value = (get(f"attention.{what}_length_mla") or get(f"attention.{what}_length") for what in ("key", "value"))
    nope = key - rotary if isinstance(key, int) and isinstance(rotary, int) else None
    groups = get("expert_group_count") or 1
    fields = {
        "num_key_value_heads": None, "head_dim": None, "kv_lora_rank": get("attention.kv_lora_rank"),
        "q_lora_rank": get("attention.q_lora_rank"), "qk_nope_head_dim": nope, "qk_rope_head_dim": rotary,
        "v_head_dim": value, "first_k_dense_replace": get("leading_dense_block_count") or 0,
        "n_routed_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count"),
        "n_shared_experts": get("expert_shared_count"), "moe_intermediate_size": get("expert_feed_forward_length"),
        "routed_scaling_factor": get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(get("expert_weights_norm")), "n_group": groups,
        "topk_group": get("expert_group_used_count") or 1,
    }
    if not sigmoid and groups > 1:
        fields["topk_method"] = "group_limited_greedy"
    return fields


def read_latent_rotation(r: ConfigReader, prefix: str, config: dict[str, Any], kind: str, factor: float) -> None:
    """YaRN, whose stretch of queries and keys a file has as a logarithm's multiplier; cosines have no factor."""
    gating = r.get(prefix + "expert_gating_func")
    if gating not in (None, 0, 1, _SIGMOID):
        raise r.unsupported(prefix + "expert_gating_func", gating, "only 1 (softmax) and 2 (sigmoid) are supported")
    scaling = prefix + "rope.scaling."
    original = r.integer(scaling + "original_context_length", config.get("max_position_embeddings"))
    multiplier = r.number(scaling + "yarn_log_multiplier", 0.0, above=-1.0)
    if kind == "none":
        return
    if kind != "yarn":
        raise r.unsupported(scaling + "type", kind, "with latent attention it is yarn or none")
    every = round(multiplier / _LOG_FACTOR, 6)
    config["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                              **({"mscale": every, "mscale_all_dim": every} if every else {"attention_factor": 1.0})}


def with_heads_apart(weight: Weight, config: ModelConfig, names: Collection[str]) -> Weight:
    """Return the matrices of heads as newer files have them: two stacks, keys transposed already."""
    found = _WEIGHT.fullmatch(weight.name) if config.latent else None
    if not found or (name := f"blk.{found[1]}.attn_{found[2]}.weight") not in names:
        return weight
    heads = config.num_attention_heads
    stack = Source(name, (heads, weight.shape[0] // heads, weight.shape[1]), each=True)
    return replace(weight, sources=stack.items)
