"""Refusals of configs with recurrent layers, and fields that published files have."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from edgeinfer.bundle.config_json import config_from_json
from edgeinfer.errors import BundleError, CheckpointError, UnsupportedModelError
from edgeinfer.graph import ModelConfig, read_config
from tests.golden_hybrids import CASES


def read(name: str, **fields: Any) -> ModelConfig:
    """The config of a golden case with other fields."""
    return read_config({**CASES[name], **fields})


@pytest.mark.parametrize(("name", "fields", "message"), [
    ("qwen3-5", {"layer_types": ["linear_attention"] * 3 + ["window"]}, "layer_types is 'window', .* full_attention"),
    ("qwen3-5", {"layer_types": ["linear_attention"]}, "layer_types is .*; it must list 4 types"),
    ("qwen3-5", {"linear_num_value_heads": 5}, "linear_num_value_heads is 5; it must be a multiple of .*_heads, 2"),
    ("qwen3-5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be a whole number from 2 to 8"),
    ("qwen3-5", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is 9; it must be a whole number from 2 to 8"),
    ("qwen3-5", {"linear_num_value_heads": 4096, "linear_value_head_dim": 4096}, "16777216 elements together"),
    ("qwen3-5", {"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads"),
    ("qwen3-5", {"attn_output_gate": False}, "attn_output_gate is False, .* models of the family have the gate"),
    ("qwen3-5", {"hidden_act": "gelu"}, "hidden_act is 'gelu', .* supported: silu, swish"),
    ("qwen3-5", {"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype is 'float16', .* supported: float32"),
    ("olmo-hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu', .* supported: silu, swish"),
    ("olmo-hybrid", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of .*_heads, 2"),
    ("olmo-hybrid", {"layer_types": ["mamba"] * 4}, "layer_types is 'mamba', .* supported: linear_attention"),
    ("olmo-hybrid", {"rope_parameters": 7}, "rope_parameters holds 7; it must be a JSON object"),
    ("kimi-linear", {"linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [3]}},
     "linear_attn_config: full_attn_layers and kda_layers must have each of the 3 layers once"),
    ("kimi-linear", {"linear_attn_config": {"kda_layers": [[1], 2, 3], "full_attn_layers": []}}, "counted from 1"),
    ("kimi-linear", {"linear_attn_config": {"kda_layers": 7}}, "each of the 3 layers once, counted from 1"),
    ("kimi-linear", {"linear_attn_config": {"num_heads": 0}}, "num_heads is 0; it must be a whole number from 1"),
    ("kimi-linear", {"linear_attn_config": {"short_conv_kernel_size": 9}}, "linear_conv_kernel_dim is 9; .* 2 to 8"),
    ("kimi-linear", {"linear_attn_config": {"gate_rank": 7}}, "gate_rank is 7"),
    ("kimi-linear", {"linear_attn_config": 7}, "linear_attn_config holds 7; it must be a JSON object"),
    ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope is False, .* published models have it on"),
    ("kimi-linear", {"moe_layer_freq": 2}, "moe_layer_freq is 2, .* only 1 is supported"),
    ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
    ("kimi-linear", {"hidden_act": "gelu"}, "hidden_act is 'gelu', .* supported: silu, swish"),
    ("kimi-linear-groups", {"layer_types": ["mamba"] * 3}, "layer_types is 'mamba', .* supported: linear_attention"),
    ("qwen3-5-moe", {"norm_topk_prob": False}, "norm_topk_prob is False, .* add up to 1"),
    ("qwen3-5-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be a whole number from 1 to 6"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [4]}, r"full_attn_idxs is \[4\], .* layers from 0 to 3"),
    ("lfm2", {"conv_L_cache": 9}, "conv_L_cache is 9; it must be a whole number from 2 to 8"),
    ("granitemoehybrid", {"time_step_limit": [0.5, 0.1]}, "time_step_limit is .*; it must be two ascending numbers"),
    ("granitemoehybrid", {"time_step_limit": [-1.0, 0.1]}, "the first no less than 0"),
    ("granitemoehybrid", {"time_step_limit": [0.0, math.nan]}, "it must be two ascending numbers"),
    ("granitemoehybrid", {"time_step_limit": 3}, "time_step_limit is 3; it must be two ascending numbers"),
    ("granitemoehybrid", {"mamba_n_groups": 5}, "mamba_n_heads is 12; it must be a multiple of mamba_n_groups, 5"),
    ("granitemoehybrid", {"mamba_d_head": 9}, "12 heads of 9 elements are not the 96 of a recurrent layer"),
    ("granitemoehybrid", {"mamba_d_head": "auto", "mamba_n_heads": 7}, "the width of a recurrent layer is 96"),
    ("granitemoehybrid", {"mamba_d_conv": 1}, "mamba_d_conv is 1; it must be a whole number from 2 to 8"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
    ("falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers has 1 values; 5 are needed"),
    ("falcon-h1", {"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers is .*; it must be a list of numbers above 0"),
    ("bamba", {"attn_layer_indices": [3]}, r"attn_layer_indices is \[3\], .* layers from 0 to 2"),
    ("nemotron-h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type is 'conv', .* supported"),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern is 'X'"),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": 7}, "hybrid_override_pattern is 7; it must"),
    ("nemotron-h", {"layers_block_type": []}, "layers_block_type is .*; it must list 1 types"),
    ("nemotron-h", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ("nemotron-h", {"attention_bias": True}, "attention_bias is True"),
    ("nemotron-h-experts", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', .* supported: relu2"),
])
def test_refused_by_name(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(name, **fields)


def test_fields_of_published_files_are_known() -> None:
    """As the model cards have them, beside those of the golden cases."""
    assert read("qwen3-5", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, mlp_only_layers=[],
                attn_output_gate=True, mamba_ssm_dtype="float32", full_attention_interval=4) == read("qwen3-5")
    assert read("kimi-linear", use_grouped_topk=True, num_expert_group=1, topk_group=1, moe_renormalize=True,
                moe_layer_freq=1, num_nextn_predict_layers=0, rope_theta=10000.0, rope_scaling=None, pretraining_tp=1,
                auto_map={"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"}) == read("kimi-linear")
    assert read("lfm2", block_dim=60, block_norm_eps=1e-5, block_use_swiglu=True, conv_dim=60, theta=300.0,
                num_heads=6, use_pos_enc=True, tie_embedding=True) == read("lfm2")
    assert read("lfm2", block_ff_dim=100, intermediate_size=64) == read("lfm2")
    assert read("granitemoehybrid", layer_types=["mamba", "attention", "mamba"], mamba_chunk_size=256,
                position_embedding_type="nope", normalization_function="rmsnorm", init_method="mup",
                time_step_limit=[0.0, math.inf]) == read("granitemoehybrid")
    assert read("nemotron-h", layers_block_type=None, hybrid_override_pattern="M-*M-", time_step_min=0.001,
                mamba_ssm_cache_dtype="float32", chunk_size=128, expand=2, rope_theta=10000,
                num_nextn_predict_layers=0,
                auto_map={"AutoModelForCausalLM": "modeling_nemotron_h.Model"}) == read("nemotron-h")
    assert read("falcon-h1", time_step_floor=1e-4, mamba_use_mlp=True, mamba_expand=2, mlp_expansion_factor=8,
                time_step_limit=[0.0, {"__float__": "Infinity"}]) == read("falcon-h1")


def test_olmo_hybrid_heads_turn_unless_theta_is_null() -> None:
    config = {name: value for name, value in CASES["olmo-hybrid"].items() if name != "rope_parameters"}
    for fields, turns in (({}, True), ({"rope_parameters": None}, True), ({"rope_theta": None}, False),
                          ({"rope_theta": 300.0, "rope_parameters": {"rope_theta": None}}, False)):
        assert bool(read_config({**config, **fields}).rotations) is turns, fields


def test_full_attention_interval() -> None:
    found = read("qwen3-5", layer_types=None, full_attention_interval=2)
    assert found.recurrent is not None
    assert found.recurrent.layers == (0, 2)
    assert read("qwen3-5", layer_types=["full_attention"] * 4).recurrent is None


@pytest.mark.parametrize(("name", "fields", "message"), [
    ("qwen3-5", {"conv_width": 9}, "config.recurrent.conv_width is 9; it must be from 2 to 8"),
    ("qwen3-5", {"heads": 0}, "config.recurrent.heads is 0; it must be from 1 to 65536"),
    ("qwen3-5", {"kind": "rwkv"}, "config.recurrent.kind is 'rwkv'; it must be conv, delta or scan"),
    ("qwen3-5", {"layers": (0, 7)}, r"config.recurrent.layers is \[0, 7\]; it must list some of the 4 layers"),
    ("qwen3-5", {"layers": ()}, "config.recurrent.layers is .*; it must list some"),
    ("qwen3-5", {"key_heads": 4}, "6 heads of 20 elements, which are not a multiple of its 4 key_heads"),
    ("granitemoehybrid", {"norm_groups": 5}, "not a multiple of its 1 key_heads and 5 norm_groups"),
    ("granitemoehybrid", {"time_limits": (0.5, 0.1)}, r"time_limits is \[0.5, 0.1\]; it must be two ascending"),
])
def test_bundles_with_impossible_recurrent_layers(name: str, fields: dict[str, Any], message: str) -> None:
    config = read(name)
    assert config.recurrent
    assert from_json(config) == config
    with pytest.raises(BundleError, match=message):
        from_json(replace(config, recurrent=replace(config.recurrent, **fields)))


@pytest.mark.parametrize(("mixers", "message"), [
    (["scan"], "config.mixers has 1 entries for 5 layers"), (["x"] * 5, "config.mixers has 'x'; each must be one of"),
    ([1] * 5, "config.mixers is .*; it must be a list of texts"),
])
def test_bundles_with_impossible_mixers(mixers: list[Any], message: str) -> None:
    config = read("nemotron-h")
    assert from_json(config) == config
    with pytest.raises(BundleError, match=message):
        from_json(replace(config, mixers=mixers))  # type: ignore[arg-type]


def from_json(config: ModelConfig) -> ModelConfig:
    """As a bundle's header has it: tuples are lists."""
    return config_from_json(plain(asdict(config)))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
