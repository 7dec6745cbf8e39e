"""Rewrite tests/golden from transformers (extra ``reference``): ``python -m tests.make_golden [NAME ...]``.

Each case is a decoder of odd sizes that shows some variants at once; the prompt is longer than any window and than the
original context of each RoPE scaling.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from typing import Any

import numpy as np

from tests.golden_experts import CASES as CASES_OF_EXPERTS
from tests.golden_hybrids import BASE
from tests.golden_hybrids import CASES as CASES_OF_HYBRIDS
from tests.golden_parts import (
    BIGCODE,
    COHERE2,
    DEEP_YARN,
    EXAONE4,
    FALCON,
    GEMMA3,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_UNIFIED,
    GLM4,
    LLAMA,
    LLAMA3,
    MINISTRAL3,
    MISTRAL,
    MROPE,
    NEOX,
    OLMO3,
    QWEN2,
    QWEN3,
    SEVEN,
    SIDE,
    SIGLIP,
    YARN,
)
from tests.helpers.golden_cases import FOLDER, GoldenCase, save, weights

N_TOKENS = 44
FEWER = 24  # of later cases: beyond their windows and LongRoPE's training context
FIRST = ("llama", "mistral", "qwen2", "qwen3")

CASES: dict[str, dict[str, Any]] = {
    "llama-mha": {**LLAMA, "rope_theta": 10000.0, "rope_scaling": None},
    "llama-gqa2-tied-relu": {**LLAMA, "num_key_value_heads": 3, "tie_word_embeddings": True, "hidden_act": "relu"},
    "llama-gqa3-bias-gelu": {
        **LLAMA, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu",
    },
    "llama-mqa-linear-relu2": {
        **LLAMA, "num_key_value_heads": 1, "hidden_act": "relu2", "intermediate_size": 150,
        "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama-llama3": {**LLAMA, "num_key_value_heads": 3, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "llama-share": {**LLAMA, "num_hidden_layers": 1, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.4}},
    "llama-yarn": {**LLAMA, "num_key_value_heads": 2, "rope_theta": 1000.0, "rope_scaling": YARN},
    "llama-yarn-mscale-gelu-tanh": {
        **LLAMA, "num_key_value_heads": 3, "head_dim": 14, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {**DEEP_YARN, "rope_theta": 1000.0},
    },
    "llama-wide": {  # more than one group of 64 columns, an odd number of groups of 32
        **LLAMA, "hidden_size": 84, "intermediate_size": 172, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-3, "rope_theta": 500000.0, "rope_scaling": None,
    },
    "mistral": {**MISTRAL, "hidden_act": "gelu_new", "rope_theta": 1000000.0},
    "mistral-window-head6": {**MISTRAL, "head_dim": 6, "sliding_window": 7, "num_hidden_layers": 3},
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 5},
    "qwen2-window": {
        **QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen2-yarn": {
        **QWEN2, "rope_theta": 1000.0,
        "rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 20},
    },
    "qwen3": {**QWEN3, "rope_theta": 1000000.0, "rope_scaling": None},
    "qwen3-window-bias-tied": {
        **QWEN3, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma": {"model_type": "gemma", **BASE, "head_dim": 14, "hidden_act": "gelu", "rope_theta": 300.0},
    "gemma2": {
        "model_type": "gemma2", **BASE, "head_dim": 14, "sliding_window": 7, "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "rope_theta": 300.0,
    },
    "gemma2-uncapped": {
        "model_type": "gemma2", **BASE, "head_dim": 8, "num_key_value_heads": 1, "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 2, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6,
    },
    "gemma3": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "final_logit_softcapping": 5.0},
    "gemma3-sections": {
        **{name: value for name, value in GEMMA3.items()
           if name not in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")},
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 900.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}},
    },
    "gemma4": GEMMA4,
    "gemma4-keys-as-values": {
        **GEMMA4, "num_hidden_layers": 4, "layer_types": None, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "num_key_value_heads": 3,
        "use_bidirectional_attention": "vision", "rope_parameters": None, "tie_word_embeddings": False,
    },
    "gemma4-wide-heads": {
        **GEMMA4, "num_hidden_layers": 3, "layer_types": SEVEN[:2] + SEVEN[-1:], "num_kv_shared_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    },
    "gemma4-mixture": {
        **GEMMA4, **GEMMA4_EXPERTS, "num_hidden_layers": 4, "layer_types": None, "num_kv_shared_layers": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "num_key_value_heads": 3, "use_bidirectional_attention": "vision",
    },
    "gemma4-mixture-rows": {**GEMMA4, **GEMMA4_EXPERTS, "num_hidden_layers": 4, "layer_types": SEVEN[:3] + SEVEN[-1:],
                            "num_kv_shared_layers": 2},
    "gemma4-unified": GEMMA4_UNIFIED,
    "gemma4-unified-wrapped": {
        "model_type": "gemma4_unified", "text_config": {**GEMMA4_UNIFIED, "tie_word_embeddings": True},
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 2, "output_proj_dims": 16},
        "audio_config": {"audio_embed_dim": 16}, "image_token_id": 98,
    },
    "gemma4-wrapped": {
        "model_type": "gemma4", "text_config": {**GEMMA4, "num_hidden_layers": 4, "layer_types": SEVEN[:3] + SEVEN[-1:],
                                                "num_kv_shared_layers": 2},
        "vision_config": {**SIGLIP, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16},
        "image_token_id": 98,
    },
    "gemma3-wrapped": {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": SIGLIP,
                       "mm_tokens_per_image": 4, "image_token_index": 98},
    "phi3": {
        "model_type": "phi3", **BASE, "sliding_window": 9, "pad_token_id": 0, "rope_theta": 300.0,
        "original_max_position_embeddings": 64,
    },
    "phi3-longrope-partial": {
        "model_type": "phi3", **BASE, "hidden_size": 72, "pad_token_id": 0, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.67,
            "original_max_position_embeddings": 16, "short_factor": [1.0, 1.5, 1.0, 2.0],
            "long_factor": [1.0, 1.7, 2.5, 4.0]},
        "original_max_position_embeddings": 16,
    },
    "smollm3": {
        "model_type": "smollm3", **BASE, "pad_token_id": 0, "no_rope_layer_interval": 2, "attention_bias": True,
        "rope_theta": 300.0, "use_sliding_window": True, "sliding_window": 9,
    },
    "granite": {
        "model_type": "granite", **BASE, "embedding_multiplier": 7.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.5, "logits_scaling": 4.0, "rms_norm_eps": 0.08, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", **BASE, "pad_token_id": 0, "rms_norm_eps": 1e-3, "rope_theta": 300.0},
    "olmo2-bias-mqa": {
        "model_type": "olmo2", **BASE, "pad_token_id": 0, "num_key_value_heads": 1, "attention_bias": True,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 99, "n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt-neo-window": {
        "model_type": "gpt_neo", "vocab_size": 99, "hidden_size": 60, "num_layers": 3, "num_heads": 6,
        "max_position_embeddings": 64, "attention_types": [[["global", "local", "local"], 1]], "window_size": 7,
        "intermediate_size": 70, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt-neox": NEOX,
    "gpt-neox-serial": {**NEOX, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    "opt": {
        "model_type": "opt", "vocab_size": 99, "hidden_size": 60, "ffn_dim": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    },
    "opt-no-bias": {
        "model_type": "opt", "vocab_size": 99, "hidden_size": 60, "ffn_dim": 100, "num_hidden_layers": 2,
        "num_attention_heads": 6, "max_position_embeddings": 64, "enable_bias": False, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "opt-projected": {
        "model_type": "opt", "vocab_size": 99, "hidden_size": 60, "ffn_dim": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "max_position_embeddings": 64, "word_embed_proj_dim": 34, "bos_token_id": 1,
        "eos_token_id": 2, "do_layer_norm_before": False,
    },
    "falcon-7b": {**FALCON, "multi_query": True, "parallel_attn": True},
    "falcon-40b": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    "falcon-11b-bias": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1,
                        "bias": True},
    "falcon-serial": {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 77},
    "falcon-rw": {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "falcon-alibi": {**FALCON, "alibi": True, "multi_query": True, "parallel_attn": True, "num_attention_heads": 5,
                     "num_hidden_layers": 2},
    "falcon-alibi-newer": {**FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2,
                           "num_hidden_layers": 2},
    "bloom": {"model_type": "bloom", "vocab_size": 99, "hidden_size": 60, "n_layer": 3, "n_head": 6,
              "seq_length": 64, "bos_token_id": 1, "eos_token_id": 2},
    "mpt": {"model_type": "mpt", "vocab_size": 99, "d_model": 60, "n_layers": 3, "n_heads": 5, "max_seq_len": 64},
    "stablelm": {
        "model_type": "stablelm", **BASE, "hidden_size": 48, "num_attention_heads": 4, "partial_rotary_factor": 0.5,
        "use_qkv_bias": True, "rope_theta": 300.0,
    },
    "stablelm-parallel": {
        "model_type": "stablelm", **BASE, "hidden_size": 48, "num_attention_heads": 4, "use_parallel_residual": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.34},
    },
    "phi": {
        "model_type": "phi", **BASE, "hidden_size": 72, "rope_theta": 300.0, "num_key_value_heads": 3,
    },
    "starcoder2-window": {
        "model_type": "starcoder2", **BASE, "sliding_window": 7, "rope_theta": 300.0,
    },
    "starcoder2-no-bias": {"model_type": "starcoder2", **BASE, "use_bias": False, "tie_word_embeddings": False},
    "cohere": {"model_type": "cohere", **BASE, "rope_theta": 300.0, "logit_scale": 0.25, "pad_token_id": 0},
    "cohere-bias": {"model_type": "cohere", **BASE, "attention_bias": True, "num_key_value_heads": 3,
                    "pad_token_id": 0, "tie_word_embeddings": False},
    "qwen2-vl-wrapped": {
        "model_type": "qwen2_5_vl", **SIDE,
        "text_config": {**QWEN2, "model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
    },
    "qwen3-vl-wrapped": {
        "model_type": "qwen3_vl",
        "vision_config": {**SIDE["vision_config"], "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
                          "out_hidden_size": 52},
        "text_config": {**QWEN3, "model_type": "qwen3_vl_text",
                        "rope_parameters": {**MROPE, "mrope_section": [3, 3, 3], "mrope_interleaved": True}},
    },
    "mistral3-wrapped": {
        "model_type": "mistral3", "tie_word_embeddings": True,
        "text_config": {**MISTRAL, "head_dim": 6, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **SIGLIP}, "image_token_index": 98,
    },
    "llama-dynamic": {**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 2, "max_position_embeddings": 20,
                      "rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "ministral3": MINISTRAL3,
    "ministral3-window": {**MINISTRAL3, "sliding_window": 9},
    "ministral3-wrapped": {
        "model_type": "mistral3", "tie_word_embeddings": False, "text_config": MINISTRAL3,
        "vision_config": {"model_type": "pixtral", **SIGLIP}, "image_token_index": 98,
    },
    "olmo3": {**OLMO3, "num_hidden_layers": 4, "rms_norm_eps": 1e-3, "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}},
    "olmo3-bias": {**OLMO3, "attention_bias": True, "rope_theta": 400.0, "rope_scaling": YARN,
                   "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "exaone4": {**EXAONE4, "num_hidden_layers": 4, "sliding_window": 7, "sliding_window_pattern": 4},
    "exaone4-whole": {**EXAONE4, "head_dim": 14, "sliding_window": None, "layer_types": 3 * ["full_attention"],
                      "tie_word_embeddings": True},
    "glm4": {**GLM4, "rms_norm_eps": 1e-4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.67}},
    "glm4-no-bias": {**GLM4, "head_dim": 14, "attention_bias": False, "partial_rotary_factor": 0.6},
    "cohere2": {**COHERE2, "num_hidden_layers": 4, "rope_theta": 300.0, "logit_scale": 0.25},
    "cohere2-bias": {**COHERE2, "attention_bias": True, "tie_word_embeddings": False,
                     "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "bitnet": {"model_type": "bitnet", **BASE, "num_key_value_heads": 2, "rope_theta": 300.0},
    "bitnet-bias-silu": {"model_type": "bitnet", **BASE, "attention_bias": True, "hidden_act": "silu",
                         "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "ernie4-5": {"model_type": "ernie4_5", **BASE, "head_dim": 14, "use_bias": True, "rope_theta": 300.0},
    "gpt-bigcode": BIGCODE,
    "gpt-bigcode-mha": {**BIGCODE, "multi_query": False, "scale_attn_weights": False, "n_inner": 70,
                        "tie_word_embeddings": False},
    "phi-head-norms": {"model_type": "phi", **BASE, "hidden_size": 72, "num_key_value_heads": 3, "qk_layernorm": True},
    "stablelm-head-norms": {"model_type": "stablelm", **BASE, "hidden_size": 48, "num_attention_heads": 4,
                            "use_parallel_residual": True, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "cohere-head-norms": {"model_type": "cohere", **BASE, "use_qk_norm": True, "pad_token_id": 0, "rope_theta": 300.0},
    **CASES_OF_EXPERTS,
    **CASES_OF_HYBRIDS,
    "qwen3-llama3-relu": {**QWEN3, "hidden_act": "relu", "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
}  # fmt: skip


def with_transformers(name: str, config: dict[str, Any]) -> GoldenCase:
    """Logits of a config by transformers."""
    import torch

    model, tensors = transformers_model(name, config)
    n = N_TOKENS if config["model_type"] in FIRST else FEWER
    ids = token_ids(name, config.get("text_config", config)["vocab_size"], n)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return GoldenCase(name, config, tensors, ids, logits)


def transformers_model(name: str, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """A model with its tensors: eager attention, float32, weights as `golden_cases.weights` gives them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(1)  # tiny matrices; more threads only wait for each other
    settings = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **_copied(settings))
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    hf_config._experts_implementation = "eager"  # others want rows of 16 bytes
    # Falcon's eager attention adds ALiBi twice, once with the mask (transformers 5.23); what runs by default does not.
    attention = "sdpa" if config.get("alibi") else "eager"
    model = kind.from_config(hf_config, attn_implementation=attention, dtype=torch.float32).eval()
    tied = {name for name, value in model.named_parameters(remove_duplicate=False)
            if name in ("lm_head.weight", "embed_out.weight") and value is model.get_input_embeddings().weight}
    tensors = {
        key: weights(f"{name}/{key}", list(value.shape)) for key, value in model.state_dict().items() if key not in tied
    }
    state = {key: torch.from_numpy(array.astype(np.float32)) for key, array in tensors.items()}
    report = model.load_state_dict(state, strict=False)
    if report.unexpected_keys or set(report.missing_keys) - tied:
        raise ValueError(f"{name}: {report}")
    model.tie_weights()
    return model, tensors


def token_ids(name: str, vocab_size: int, n: int = N_TOKENS) -> list[int]:
    """A random prompt that depends on the name alone."""
    bits = hashlib.shake_256(f"{name}/ids".encode()).digest(2 * n)
    return [int(x) % vocab_size for x in np.frombuffer(bits, "<u2")]


def _copied(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers completes the dictionaries that it is given."""
    return copy.deepcopy(settings)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case_name in sys.argv[1:] or CASES:
        save(with_transformers(case_name, CASES[case_name]))
        print(f"{case_name}: {(FOLDER / f'{case_name}.npz').stat().st_size} bytes")
