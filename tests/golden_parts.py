"""Configs that the golden cases vary, for make_golden.py and golden_experts.py."""

from __future__ import annotations

from tests.golden_hybrids import BASE

LLAMA = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "bos_token_id": None}
QWEN3 = {**QWEN2, "model_type": "qwen3", "hidden_size": 52, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 18}  # fmt: skip
MIXTRAL = {**MISTRAL, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
           "intermediate_size": 44}  # fmt: skip
QWEN2_MOE = {**QWEN2, "model_type": "qwen2_moe", "num_experts": 7, "num_experts_per_tok": 3,
             "moe_intermediate_size": 36, "shared_expert_intermediate_size": 52, "decoder_sparse_step": 1,
             "norm_topk_prob": False, "qkv_bias": True, "mlp_only_layers": []}  # fmt: skip
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
             "moe_intermediate_size": 38, "norm_topk_prob": True, "decoder_sparse_step": 1,
             "mlp_only_layers": []}  # fmt: skip
LATENT = {"vocab_size": 99, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3,
          "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 48, "qk_nope_head_dim": 10,
          "qk_rope_head_dim": 6, "v_head_dim": 16, "moe_intermediate_size": 36, "max_position_embeddings": 64,
          "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "n_routed_experts": 7, "n_shared_experts": 2,
            "num_experts_per_tok": 3, "first_k_dense_replace": 1}  # fmt: skip
GLM = {"model_type": "glm4_moe_lite", **LATENT, "q_lora_rank": 20, "n_routed_experts": 8, "n_shared_experts": 1,
       "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.8}  # fmt: skip
GLM4_MOE = {"model_type": "glm4_moe", **BASE, "head_dim": 14, "n_routed_experts": 8, "n_shared_experts": 1,
            "num_experts_per_tok": 3, "moe_intermediate_size": 36, "first_k_dense_replace": 1,
            "pad_token_id": 0}  # fmt: skip
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 14,
           "intermediate_size": 44, "sliding_window": 7, "num_local_experts": 5, "num_experts_per_tok": 2,
           "swiglu_limit": 0.7}  # fmt: skip
"""With a limit that gates and ups of so small a model reach."""
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEP_YARN = {**YARN, "beta_fast": 8, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.6, "truncate": False}

NEOX = {"model_type": "gpt_neox", **BASE, "num_attention_heads": 5, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}  # fmt: skip
del NEOX["num_key_value_heads"]
GEMMA3 = {"model_type": "gemma3_text", **BASE, "head_dim": 14, "sliding_window": 7, "query_pre_attn_scalar": 20,
          "sliding_window_pattern": 3, "rope_theta": 3000.0, "rope_local_base_freq": 50.0}  # fmt: skip
SEVEN = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention",
         "sliding_attention", "full_attention"]  # fmt: skip
GEMMA4 = {"model_type": "gemma4_text", **BASE, "num_hidden_layers": 7, "layer_types": SEVEN, "head_dim": 14,
          "global_head_dim": 22, "sliding_window": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
          "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 103, "final_logit_softcapping": 5.0,
          "rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 300.0,
                                                 "partial_rotary_factor": 0.5},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}  # fmt: skip
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 9, "top_k_experts": 3, "moe_intermediate_size": 38}
GEMMA4_UNIFIED = {
    **{key: value for key, value in GEMMA4.items() if "per_layer" not in key}, "model_type": "gemma4_unified_text",
    "num_hidden_layers": 4, "layer_types": None, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1}
FALCON = {"model_type": "falcon", "vocab_size": 99, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6,
          "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64, "rope_theta": 300.0}  # fmt: skip
SIDE = {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
                          "out_hidden_size": 60, "fullatt_block_indexes": [0]}}  # fmt: skip
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 8, "patch_size": 4}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 1], "rope_theta": 2000.0}

OLMO3 = {"model_type": "olmo3", **BASE, "pad_token_id": 0, "sliding_window": 7}
EXAONE4 = {"model_type": "exaone4", **BASE, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}}
GLM4 = {"model_type": "glm4", **BASE, "head_dim": 12, "pad_token_id": 0}
COHERE2 = {"model_type": "cohere2", **BASE, "sliding_window": 7, "pad_token_id": 0}
MINISTRAL3 = {**MISTRAL, "model_type": "ministral3", "head_dim": 14, "rope_parameters": {
    **YARN, "original_max_position_embeddings": 7, "max_position_embeddings": 64, "rope_theta": 1000.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.8}}
GRANITE_SHARED = {**LLAMA, "model_type": "granitemoeshared", "num_key_value_heads": 3, "num_local_experts": 4,
                  "num_experts_per_tok": 2, "intermediate_size": 40, "shared_intermediate_size": 52,
                  "embedding_multiplier": 7.0, "residual_multiplier": 0.3, "attention_multiplier": 0.5,
                  "logits_scaling": 4.0, "rms_norm_eps": 1e-2, "tie_word_embeddings": True}  # fmt: skip
BIGCODE = {"model_type": "gpt_bigcode", "vocab_size": 99, "n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 64,
           "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
