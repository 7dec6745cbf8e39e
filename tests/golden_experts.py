"""Golden cases of mixtures of experts, for make_golden.py."""

from __future__ import annotations

from typing import Any

from tests.golden_parts import (
    DEEP_YARN,
    DEEPSEEK,
    GLM,
    GLM4_MOE,
    GPT_OSS,
    GRANITE_SHARED,
    LLAMA,
    MIXTRAL,
    MROPE,
    QWEN2_MOE,
    QWEN3_MOE,
    SIDE,
    YARN,
)

CASES: dict[str, dict[str, Any]] = {
    "mixtral": {**MIXTRAL, "rope_theta": 1000000.0},
    "mixtral-window": {**MIXTRAL, "sliding_window": 9, "num_local_experts": 3, "num_experts_per_tok": 3},
    "qwen2-moe": {**QWEN2_MOE, "rope_theta": 1000.0},
    "qwen2-moe-dense-layer": {**QWEN2_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    "olmoe": {
        **LLAMA, "model_type": "olmoe", "num_key_value_heads": 2, "num_experts": 9, "num_experts_per_tok": 4,
        "intermediate_size": 42, "norm_topk_prob": False, "rope_theta": 1000.0,
    },
    "granitemoe": {
        **LLAMA, "model_type": "granitemoe", "num_key_value_heads": 3, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 40, "embedding_multiplier": 7.0, "residual_multiplier": 0.3, "attention_multiplier": 0.5,
        "logits_scaling": 4.0, "rms_norm_eps": 1e-2, "tie_word_embeddings": True,
    },
    "deepseek-v2": {**DEEPSEEK, "rope_theta": 300.0},
    "deepseek-v2-lora-yarn": {
        **DEEPSEEK, "q_lora_rank": 28, "topk_method": "group_limited_greedy", "n_routed_experts": 6, "n_group": 3,
        "topk_group": 2, "routed_scaling_factor": 2.5, "attention_bias": True, "num_hidden_layers": 2,
        "rope_parameters": {**DEEP_YARN, "mscale_all_dim": 3.0, "rope_theta": 300.0},
    },
    "deepseek-v3": {
        **GLM, "model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": {**DEEP_YARN, "mscale_all_dim": 1.0, "rope_theta": 300.0},
    },
    "glm4-moe-lite": {**GLM, "rope_theta": 300.0},
    "glm4-moe-lite-halves": {
        **GLM, "rope_theta": 300.0, "rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None,
        "n_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "glm4-moe": {**GLM4_MOE, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5, "n_group": 2,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.43}},
    "glm4-moe-plain": {**GLM4_MOE, "head_dim": 12, "norm_topk_prob": False, "n_routed_experts": 7, "rope_theta": 300.0,
                       "first_k_dense_replace": 0, "num_hidden_layers": 2, "n_shared_experts": 2},
    "gpt-oss": {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150.0}},
    "gpt-oss-layers": {**GPT_OSS, "attention_bias": False, "num_hidden_layers": 3, "num_key_value_heads": 6,
                       "intermediate_size": 60, "layer_types": ["full_attention"] + 2 * ["sliding_attention"],
                       "rope_parameters": {"rope_type": "default", "rope_theta": 150.0}},
    "qwen3-moe": {**QWEN3_MOE, "rope_theta": 1000000.0},
    "qwen3-moe-steps-bias": {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "attention_bias": True,
                             "norm_topk_prob": False, "num_experts_per_tok": 1},
    "qwen3-moe-heads": {**{key: value for key, value in QWEN3_MOE.items() if key != "head_dim"}, "hidden_size": 56},
    "qwen2-moe-window": {**QWEN2_MOE, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7,
                         "max_window_layers": 3},
    "qwen3-vl-moe-wrapped": {
        "model_type": "qwen3_vl_moe",
        "vision_config": {**SIDE["vision_config"], "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
                          "out_hidden_size": 52},
        "text_config": {**{key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"},
                        "model_type": "qwen3_vl_moe_text",
                        "rope_parameters": {**MROPE, "mrope_section": [3, 3, 3], "mrope_interleaved": True}},
    },
    "deepseek-v2-dense": {**DEEPSEEK, "num_hidden_layers": 2, "first_k_dense_replace": 2, "rope_theta": 300.0},
    "granitemoeshared": GRANITE_SHARED,
}  # fmt: skip
