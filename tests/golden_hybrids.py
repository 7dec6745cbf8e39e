"""Golden cases of models with recurrent layers, for make_golden.py."""

from __future__ import annotations

from typing import Any

BASE = {"vocab_size": 99, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
QWEN3_5 = {"model_type": "qwen3_5_text", **BASE, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
           "head_dim": 18, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
           "linear_value_head_dim": 20, "rope_parameters": {
               "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.34}}  # fmt: skip
LFM2 = {"model_type": "lfm2", **BASE, "num_hidden_layers": 4, "layer_types": [
    "conv", "full_attention", "conv", "conv"], "rope_theta": 300.0}  # fmt: skip
GRANITE_HYBRID = {
    "model_type": "granitemoehybrid", **BASE, "hidden_size": 48, "num_attention_heads": 4, "num_local_experts": 0,
    "shared_intermediate_size": 76, "mamba_n_heads": 12, "mamba_n_groups": 1, "mamba_d_state": 10, "mamba_d_head": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "embedding_multiplier": 7.0,
    "residual_multiplier": 0.3, "attention_multiplier": 0.5, "logits_scaling": 4.0, "rms_norm_eps": 0.02}  # fmt: skip
FALCON_H1 = {
    "model_type": "falcon_h1", **BASE, "hidden_size": 48, "num_attention_heads": 4, "pad_token_id": 0,
    "mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_n_groups": 1, "mamba_d_state": 14, "rope_theta": 300.0,
    "lm_head_multiplier": 0.3, "embedding_multiplier": 5.0, "ssm_multipliers": [0.5, 2.0, 0.5, 4.0, 0.25],
    "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0, "mlp_multipliers": [2.0, 0.5], "key_multiplier": 0.5,
    "attention_out_multiplier": 0.25, "attention_in_multiplier": 2.0}  # fmt: skip
"""Matrices have multipliers by which float16 stays exact."""
QWEN_MOE = {"rms_norm_eps": 1e-4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 38,
            "shared_expert_intermediate_size": 44}  # fmt: skip
BAMBA = {"model_type": "bamba", **BASE, "hidden_size": 48, "num_attention_heads": 4, "mamba_n_heads": 8,
         "mamba_d_state": 14, "rope_theta": 300.0}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", **BASE, "num_hidden_layers": 5, "hidden_size": 48, "num_attention_heads": 4,
    "head_dim": 14, "ssm_state_size": 10, "mamba_num_heads": 6, "mamba_head_dim": 18, "n_groups": 2,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}  # fmt: skip
NEMOTRON_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36,
                    "n_group": 2, "topk_group": 1, "moe_shared_expert_intermediate_size": 52,
                    "routed_scaling_factor": 2.5}  # fmt: skip
MAMBA2 = {"model_type": "mamba2", "vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 8,
          "head_dim": 12, "state_size": 10, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
OLMO_HYBRID = {"model_type": "olmo_hybrid", **BASE, "hidden_size": 48, "num_attention_heads": 4, "pad_token_id": 0,
               "linear_num_key_heads": 2, "linear_key_head_dim": 10, "linear_value_head_dim": 20,
               "rms_norm_eps": 1e-2}  # fmt: skip
KIMI = {"model_type": "kimi_linear", "vocab_size": 99, "hidden_size": 60, "intermediate_size": 100,
        "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 48,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 16, "moe_intermediate_size": 36,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "qwen3-5": QWEN3_5,
    "qwen3-5-equal-heads": {
        **QWEN3_5, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
        "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    "qwen3-5-wrapped": {
        "model_type": "qwen3_5", "tie_word_embeddings": True,
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
                          "num_position_embeddings": 16, "out_hidden_size": 48},
        "text_config": {**QWEN3_5, "rope_parameters": {
            "rope_type": "default", "rope_theta": 2000.0, "mrope_section": [1, 1, 1],
            "mrope_interleaved": True, "partial_rotary_factor": 0.34}}},
    "qwen3-5-moe": {**{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"}, **QWEN_MOE,
                    "model_type": "qwen3_5_moe_text"},
    "qwen3-5-moe-wrapped": {
        "model_type": "qwen3_5_moe",
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
                          "num_position_embeddings": 16, "out_hidden_size": 48},
        "text_config": {**QWEN3_5, **QWEN_MOE, "model_type": "qwen3_5_moe_text", "linear_key_head_dim": 14,
                        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}},
    "qwen3-next": {**QWEN3_5, **QWEN_MOE, "model_type": "qwen3_next", "norm_topk_prob": False},
    "qwen3-next-dense-layer": {**QWEN3_5, **QWEN_MOE, "model_type": "qwen3_next", "mlp_only_layers": [1],
                               "linear_num_key_heads": 4, "linear_num_value_heads": 4, "num_hidden_layers": 3,
                               "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "olmo-hybrid": {**OLMO_HYBRID, "num_hidden_layers": 4, "linear_num_value_heads": 6, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0}},
    "olmo-hybrid-no-rope": {
        **OLMO_HYBRID, "linear_num_value_heads": 2, "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3,
        "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": None}},
    "kimi-linear": {  # with the fields of published configs
        **KIMI, "q_lora_rank": None, "linear_attn_config": {
            "num_heads": 5, "head_dim": 18, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2]},
        "num_experts": 7, "num_experts_per_token": 3, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "model_max_length": 64, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-2, "head_dim": 12,
        "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
    "kimi-linear-groups": {
        **KIMI, "q_lora_rank": 20, "linear_num_heads": 3, "linear_head_dim": 33, "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_local_experts": 8,
        "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
        "mlp_layer_types": ["dense", "dense", "sparse"], "attention_bias": True, "max_position_embeddings": 64},
    "bamba": {**BAMBA, "attn_layer_indices": [1], "mamba_n_groups": 4},
    "bamba-bias": {**BAMBA, "attn_layer_indices": [2], "mamba_n_groups": 1, "mamba_d_conv": 3, "mlp_bias": True,
                   "attention_bias": True, "mamba_proj_bias": True, "time_step_limit": [0.2, 0.9]},
    "nemotron-h": NEMOTRON_H,
    "nemotron-h-bias": {
        **{name: value for name, value in NEMOTRON_H.items() if name != "layers_block_type"}, "n_groups": 1,
        "hybrid_override_pattern": "M*-MM", "use_bias": True, "mlp_bias": True, "use_conv_bias": False,
        "conv_kernel": 3},
    "nemotron-h-experts": {**NEMOTRON_H, **NEMOTRON_EXPERTS, "layers_block_type": [
        "linear_attention", "moe", "full_attention", "mlp", "moe"]},
    "nemotron-h-latent": {**NEMOTRON_H, **NEMOTRON_EXPERTS, "n_group": 1, "moe_latent_size": 28, "n_groups": 3,
                          "norm_topk_prob": False, "num_hidden_layers": 3, "layers_block_type": [
                              "linear_attention", "moe", "full_attention"]},
    "mamba2": {**MAMBA2, "n_groups": 4},
    "mamba2-bias": {**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3,
                    "time_step_limit": [0.2, 0.9], "num_hidden_layers": 2},
    "lfm2": {**LFM2, "block_multiple_of": 12, "block_ffn_dim_multiplier": 1.3},
    "lfm2-bias": {**LFM2, "layer_types": None, "full_attn_idxs": [3], "conv_bias": True, "conv_L_cache": 4,
                  "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3},
    "lfm2-moe": {**LFM2, "model_type": "lfm2_moe", "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 38, "routed_scaling_factor": 1.7},
    "lfm2-moe-no-bias": {**LFM2, "model_type": "lfm2_moe", "num_dense_layers": 0, "num_experts": 5,
                         "num_experts_per_tok": 3, "moe_intermediate_size": 44, "use_expert_bias": False,
                         "norm_topk_prob": False, "num_hidden_layers": 3, "layer_types": [
                             "conv", "full_attention", "conv"]},
    "granitemoehybrid": {**GRANITE_HYBRID, "tie_word_embeddings": True},
    "granitemoehybrid-experts": {
        **GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 36,
        "mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "attention_bias": True, "position_embedding_type": "rope", "rope_theta": 300.0,
        "time_step_limit": [0.3, 1.1]},
    "falcon-h1": {**FALCON_H1, "num_hidden_layers": 2},
    "falcon-h1-norm": {
        **FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2, "mamba_d_head": 12,
        "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
        "num_hidden_layers": 2},
    "falcon-h1-gate-first": {
        **{name: value for name, value in FALCON_H1.items() if "multiplier" not in name}, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "mamba_n_groups": 3, "mamba_d_conv": 2, "tie_word_embeddings": True,
        "mamba_conv_bias": False, "time_step_limit": [0.5, 1.5], "num_hidden_layers": 2},
}  # fmt: skip
