"""Meaning of configs, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import (
    ModelConfig,
    RopeConfig,
    architectures,
    build_graph,
    read_config,
    requested_types,
    supported_architectures,
)

NEEDED = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
LLAMA = {"model_type": "llama", **NEEDED}
MISTRAL = {"model_type": "mistral", **NEEDED}
QWEN2 = {"model_type": "qwen2", **NEEDED, "num_key_value_heads": 8}
QWEN3 = {"model_type": "qwen3", **NEEDED, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def test_supported_architectures() -> None:
    """A file each, and those of Llama's block among them."""
    files = {path.stem for path in Path(architectures.__path__[0]).glob("*.py")}
    assert supported_architectures() == sorted(files - {"__init__"})
    assert {"llama", "mistral", "qwen2", "qwen3"} < files


def test_absent_fields_take_the_architecture_s_defaults() -> None:
    assert read_config(LLAMA) == ModelConfig(
        model_type="llama", vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, head_dim=8, hidden_act="silu", rms_norm_eps=1e-6,
        max_position_embeddings=2048, rope=RopeConfig(10000.0), bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip
    mistral = read_config(MISTRAL)
    assert (mistral.num_key_value_heads, mistral.windows) == (8, (4096,) * 4)
    assert mistral.max_position_embeddings == 131072
    qwen2 = read_config(QWEN2)
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.windows) == (True, False, ())
    assert (qwen2.bos_token_id, qwen2.eos_token_ids) == (None, ())
    qwen3 = read_config(QWEN3)
    assert (qwen3.head_dim, qwen3.attention_bias, qwen3.max_position_embeddings) == (128, False, 32768)


def test_null_is_not_absent_where_transformers_tells_them_apart() -> None:
    assert read_config({**MISTRAL, "sliding_window": None}).windows == ()
    assert read_config({**MISTRAL, "num_attention_heads": 16, "num_key_value_heads": None}).num_key_value_heads == 16
    assert read_config({**LLAMA, "bos_token_id": None, "eos_token_id": None}).eos_token_ids == ()


def test_biases() -> None:
    llama = read_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = read_config({**QWEN3, "attention_bias": True})
    assert (qwen3.attention_bias, qwen3.attention_output_bias, qwen3.mlp_bias) == (True, True, False)


def test_windows_of_qwen() -> None:
    sliding = {**QWEN2, "use_sliding_window": True, "sliding_window": 7}
    assert read_config({**sliding, "max_window_layers": 3}).windows == (0, 0, 0, 7)
    assert read_config({**sliding, "max_window_layers": 4}).windows == ()
    assert read_config({**sliding, "use_sliding_window": False, "max_window_layers": 0}).windows == ()
    assert read_config({**sliding, "sliding_window": None, "max_window_layers": 0}).windows == ()
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = read_config({**sliding, "layer_types": types})
    assert config.windows == (7, 0, 0, 7)
    assert [config.window(i) for i in range(4)] == [7, 0, 0, 7]
    assert read_config(QWEN2).window(3) == 0


@pytest.mark.parametrize(
    ("name", "ours"),
    [("silu", "silu"), ("swish", "silu"), ("relu", "relu"), ("relu2", "relu2"), ("squared_relu", "relu2"),
     ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")],
)  # fmt: skip
def test_activations(name: str, ours: str) -> None:
    assert read_config({**LLAMA, "hidden_act": name}).hidden_act == ours


def test_the_two_spellings_of_rope_agree() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn"}}
    new = {"rope_parameters": {**YARN, "rope_theta": 5e5}}
    only_type = {"rope_theta": 5e5, "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in YARN.items()}}
    ropes = [read_config({**LLAMA, **fields}).rope for fields in (old, new, only_type, {**old, **new})]
    assert ropes[0] == ropes[1] == ropes[2] == ropes[3]
    assert (ropes[0].kind, ropes[0].theta, ropes[0].original_max_position_embeddings) == ("yarn", 5e5, 1024)


def test_rope_defaults() -> None:
    assert read_config({**LLAMA, "rope_scaling": {}, "rope_parameters": None, "rope_theta": 7}).rope == RopeConfig(7.0)
    assert read_config({**LLAMA, "rope_scaling": {"rope_type": "default", "factor": 1.0}}).rope == RopeConfig(10000.0)
    linear = read_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}).rope
    assert linear == RopeConfig(10000.0, "linear", 2.0)
    assert read_config({**LLAMA, "rope_scaling": {**YARN, "rope_type": "linear"}}).rope.kind == "linear"
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read_config({**LLAMA, "rope_scaling": llama3}).rope.original_max_position_embeddings == 2048
    outside = {**LLAMA, "rope_scaling": {**llama3, "original_max_position_embeddings": 4}}
    assert read_config({**outside, "original_max_position_embeddings": 64}).rope.original_max_position_embeddings == 64


def test_yarn_attention_factor() -> None:
    def factor(**fields: Any) -> float:
        return read_config({**LLAMA, "rope_scaling": {**YARN, **fields}}).rope.attention_factor

    assert factor() == pytest.approx(1.138629436)  # 0.1 ln 4 + 1
    assert factor(factor=1.0) == factor(factor=0.5) == 1.0
    assert factor(attention_factor=0.7) == 0.7
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(mscale=0.707, mscale_all_dim=0) == factor(mscale=0.707) == factor()
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.277258872 / 1.138629436)
    implied = read_config({**LLAMA, "rope_scaling": {**YARN, "factor": None}}).rope
    assert implied.factor == 2.0
    rope = read_config({**LLAMA, "rope_scaling": {**YARN, "beta_fast": None, "beta_slow": 0, "truncate": False}}).rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, False)


def test_generation_config_goes_before_config() -> None:
    generation = {"bos_token_id": 5, "eos_token_id": [7, 8, 7], "temperature": 0.6}
    config = read_config({**LLAMA, "eos_token_id": 3}, generation)
    assert (config.bos_token_id, config.eos_token_ids) == (5, (7, 8))
    assert read_config({**LLAMA, "eos_token_id": 3}, {"eos_token_id": None}).eos_token_ids == (3,)
    assert read_config({**LLAMA, "eos_token_id": 3}, {}).eos_token_ids == (3,)


WELL_KNOWN = {
    "TinyLlama-1.1B": (1_100_048_384, {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False}),
    "Llama-3.2-1B": (1_235_814_400, {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000, "eos_token_id": 128001,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
    "SmolLM2-135M": (134_515_008, {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "is_llama_config": True,
        "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True, "initializer_range": 0.04,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "Mistral-7B-v0.1": (7_241_732_096, {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "tie_word_embeddings": False}),
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1000000.0,
        "max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False,
        "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151643}),
    "Qwen3-0.6B": (596_049_920, {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "attention_bias": False,
        "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}),
    "Olmo-3-7B": (7_298_011_136, {"architectures": ["Olmo3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": 8 * (3 * ["sliding_attention"] +
        ["full_attention"]), "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window":
        4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100278}),
    "EXAONE-4.0-1.2B": (1_279_391_488, {"model_type": "exaone4", "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 361, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 4096,
        "layer_types": 30 * ["full_attention"], "max_position_embeddings": 65536, "num_attention_heads": 32,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type":
        "llama3"}, "rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None,
        "tie_word_embeddings": True, "vocab_size": 102400}),
    "EXAONE-4.0-32B": (32_003_216_384, {"model_type": "exaone4", "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 27392, "layer_types": 16 * (3 * ["sliding_attention"] + ["full_attention"]),
        "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type":
        "llama3"}, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False, "vocab_size": 102400}),
    "GLM-4-9B-0414": (9_400_279_040, {"model_type": "glm4", "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 151552}),
    "c4ai-command-r7b-12-2024": (8_028_033_024, {"model_type": "cohere2", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps":
        1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
        "pad_token_id": 0, "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
        "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size":
        256000}),
    "starcoderbase-1b": (1_137_207_296, {"activation_function": "gelu", "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0, "inference_runner": 0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "max_batch_size": None, "max_sequence_length": None,
        "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer":
        24, "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "use_cache": True, "validate_runner_input": True, "vocab_size": 49152}),
    "Ministral-3-3B": (3_429_006_336, {"model_type": "mistral3", "image_token_index": 10,
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "vision_config": {}, "text_config": {"attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters": {"beta_fast":
        32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
        "sliding_window": None, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 131072},
        "tie_word_embeddings": True}),
    "opt-350m": (331_196_416, {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function":
        "relu", "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": False, "dropout": 0.1,
        "eos_token_id": 2, "ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16, "num_hidden_layers": 24,
        "pad_token_id": 1, "prefix": "</s>", "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 512}),
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_well_known_models_have_the_parameters_that_their_cards_say(name: str) -> None:
    count, config = WELL_KNOWN[name]
    assert build_graph(read_config(config), requested_types()).weight_count == count


def test_fields_that_change_nothing_pass() -> None:
    harmless = {
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "transformers_version": "4.46.0",
        "attention_dropout": 0.1, "initializer_range": 0.02, "pretraining_tp": 2, "use_cache": True,
        "pad_token_id": 0, "id2label": {"0": "a"}, "temperature": 0.7, "unsloth_fixed": True,
        "rope_interleaved": False, "quantization_config": None, "attn_logit_softcapping": None, "num_experts": 0,
        "partial_rotary_factor": 1.0, "residual_multiplier": 1.0, "is_causal": True, "pruned_heads": {},
        "auto_map": {"AutoConfig": "configuration_x.XConfig"}, "some_novelty": False,
    }  # fmt: skip
    assert read_config({**LLAMA, **harmless}) == read_config(LLAMA)


NOT_SUPPORTED = [
    (LLAMA, {"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\}.*convert the checkpoint that"),
    (LLAMA, {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'.*supported: silu, swish, relu"),
    (LLAMA, {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
    (LLAMA, {"rope_scaling": {"type": "ntk", "factor": 2.0}},
     "config.json, rope_scaling: type is 'ntk'.*supported: default, linear, dynamic, llama3, yarn"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "rope_scaling: alpha is 1000.0"),
    (LLAMA, {"rope_parameters": {"rope_type": "query_scale", "factor": 2.0}}, "rope_type is 'query_scale'"),
    (LLAMA, {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
     "rope_parameters: rope_type is 'proportional'"),
    (LLAMA, {"rope_scaling": {**YARN, "long_factor": [1.0]}}, r"rope_scaling: long_factor is \[1.0\]"),
    (LLAMA, {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24]}}, r"mrope_section is \[16, 24\]"),
    (LLAMA, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor is 2.0.*only 1 is supported"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor is 0.5.*transformers cannot run it either"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
     "partial_rotary_factor is 0.5.*transformers cannot run it either"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention is"),
    (QWEN2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5.*only 1 is supported"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0.*remove it from the file"),
    (LLAMA, {"num_experts": 8}, "num_experts is 8"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts is 8"),
    (LLAMA, {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0.*only 1 is supported"),
    (LLAMA, {"residual_multiplier": 0}, "residual_multiplier is 0"),
    (LLAMA, {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
    (LLAMA, {"attention_multiplier": 0.01}, "attention_multiplier is 0.01"),
    (LLAMA, {"is_causal": False}, "is_causal is False.*only True is supported"),
    (LLAMA, {"use_rope": False}, "use_rope is False"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window is 4096"),
    (LLAMA, {"layer_types": ["full_attention"] * 4}, "layer_types is"),
    (LLAMA, {"some_novelty": "on"}, "some_novelty is 'on', which edgeinfer does not support; if it does not change"),
    (LLAMA, {"some_novelty": list(range(100))}, r"some_novelty is \[0, 1, .*\.\.\., which"),
    (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map is"),
    (LLAMA, {"auto_map": "modeling_x.X"}, "auto_map is"),
    (LLAMA, {"head_dim": 7}, "head dimension is 7; RoPE needs an even one"),
    (MISTRAL, {"attention_bias": True}, "attention_bias is True"),
    (MISTRAL, {"mlp_bias": True}, "mlp_bias is True"),
    (QWEN2, {"attention_bias": False}, "attention_bias is False.*Qwen2's attention has a bias"),
    (QWEN2, {"use_mrope": True}, "use_mrope is True"),
    (QWEN3, {"mlp_bias": True}, "mlp_bias is True"),
    (QWEN3, {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
     "layer_types is 'linear_attention'.*supported: full_attention, sliding_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "fields", "message"), NOT_SUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(base: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as error:
        read_config({**base, **fields})
    assert str(error.value).startswith("config.json")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", "model_type is 'mamba', which edgeinfer does not support; .*supported: bamba, bamboo, .*, qwen2, "),
        ("qwen3_prev", "the nearest: qwen3"),
        ("Llama", "the nearest: llama"),
        ("gemma3n", "the nearest: gemma.*supported: "),
        ("../llama", "model_type is '../llama'"),
        ("__init__", "model_type is '__init__'"),
        (["llama"], r"model_type is \['llama'\]"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest(model_type: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config({**NEEDED, "model_type": model_type})


@pytest.mark.parametrize("name", ["model_type", *NEEDED])
def test_a_missing_field_is_named(name: str) -> None:
    for config in ({k: v for k, v in LLAMA.items() if k != name}, {**LLAMA, name: None}):
        with pytest.raises(CheckpointError, match=f"config.json lacks '{name}'"):
            read_config(config)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear"}, "config.json, rope_scaling lacks 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "lacks 'low_freq_factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
         "low_freq_factor is 4; it must be below high_freq_factor 1"),
        ({"type": "linear", "factor": 0}, "factor is 0; it must be a number above 0"),
        ({"type": "linear", "factor": float("nan")}, "factor is nan; it must be a number above 0"),
        ({"type": "linear", "factor": "2"}, "factor is '2'; it must be a number"),
        ({"type": "linear", "factor": True}, "factor is True; it must be a number"),
        ({**YARN, "truncate": 1}, "truncate is 1; it must be true or false"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0; it must be a whole"),
        ("yarn", "config.json, rope_scaling holds 'yarn'; it must be a JSON object"),
    ],
)  # fmt: skip
def test_bad_rope_sections(rope: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**LLAMA, "rope_scaling": rope})


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (LLAMA, {"vocab_size": 0}, "vocab_size is 0; it must be a whole number from 1 to 4194304"),
        (LLAMA, {"hidden_size": -64}, "hidden_size is -64; it must be a whole number"),
        (LLAMA, {"hidden_size": 10**9}, "hidden_size is 1000000000; it must be a whole number from 1 to 131072"),
        (LLAMA, {"hidden_size": 64.0}, "hidden_size is 64.0; it must be a whole number"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
        (LLAMA, {"intermediate_size": "96"}, "intermediate_size is '96'; it must be a whole number"),
        (LLAMA, {"intermediate_size": [96] * 4}, r"intermediate_size is \[96, 96, 96, 96\]; it must be a whole number"),
        (LLAMA, {"num_key_value_heads": 3}, "num_attention_heads is 8; .* a multiple of num_key_value_heads, 3"),
        (LLAMA, {"hidden_size": 60}, "hidden_size is 60, no multiple of num_attention_heads, 8, and head_dim is not"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
         "partial_rotary_factor is 1.5; it must be a number above 0 and at most 1"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0 and at most 1"),
        (LLAMA, {"rope_theta": 1.0}, "rope_theta is 1.0; it must be a number above 1"),
        (LLAMA, {"attention_bias": "yes"}, "attention_bias is 'yes'; it must be true or false"),
        (LLAMA, {"eos_token_id": 100}, r"eos_token_id is 100; it must be token ids from 0 to 99 \(vocab_size - 1\)"),
        (LLAMA, {"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]; it must be token ids"),
        (LLAMA, {"bos_token_id": "1"}, "bos_token_id is '1'; it must be token ids"),
        (LLAMA, {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0},
                 "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
         "rope_scaling and rope_parameters disagree; keep the one that is right"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0; it must be a whole number from 1"),
        (QWEN2, {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\]; it must list 4 types"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 4}, "but use_sliding_window is False and sliding_window 4096"),
    ],
)  # fmt: skip
def test_values_that_no_model_has(base: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_config({**base, **fields})
    assert not isinstance(error.value, UnsupportedModelError)


def test_files_that_are_no_objects() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json holds \[1\]; it must be a JSON object"):
        read_config([1])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds 3; it must be a JSON object"):
        read_config(LLAMA, 3)  # type: ignore[arg-type]
