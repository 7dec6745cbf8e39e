"""gpt-oss (OpenAI, arXiv 2508.10925): attention with sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import CheckpointError
from ..builder.moe import count_experts
from ..config import ExpertsConfig, ModelConfig
from ..families.family import ExpertModules, Family, Gguf, GgufExperts, Ollama
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder, read_sliding
from ..hf_config.reader import ConfigReader
from .mixtral import forward

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}
"""The rotation of configs that say none."""
ALPHA, LIMIT = 1.702, 7.0


def read(c: ConfigReader) -> ModelConfig:
    """Read the config: a window in every second layer, beginning with the first; the activation is gpt-oss's own, not
    `hidden_act`.
    """
    if not c.has("rope_scaling") and not c.has("rope_parameters"):
        c = c.instead(rope_parameters=YARN)
    c.get("initial_context_length")  # as the rotation has it
    n, active = count_experts(c, "num_local_experts", 128, 4)
    if (same := c.get("experts_per_token", active)) != active:
        raise CheckpointError(f"{c.where}: num_experts_per_tok is {active} and experts_per_token {same!r:.40}; they "
                              "must agree.")
    if (alpha := c.number("swiglu_alpha", ALPHA)) != ALPHA:
        raise c.unsupported("swiglu_alpha", alpha, f"only {ALPHA} is supported")
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 128)
    windows = read_sliding(c, window, lambda i: i % 2 == 0 and window is not None)
    bias = c.flag("attention_bias", True)
    experts = ExpertsConfig(n, active, c.integer("intermediate_size", high=2**20), bias=True)
    config = read_decoder(c, DEFAULTS, windows=windows, attention_bias=bias, attention_output_bias=bias,
                          attention_sinks=True, experts=experts)
    return replace(config, hidden_act="swiglu_oai", hidden_act_limit=c.number("swiglu_limit", LIMIT))


def _stretched(m: GgufMetadata, section: dict[str, Any]) -> dict[str, Any]:
    return {**section, "truncate": False}


FAMILY = Family(
    (Gguf("gpt-oss", fields=lambda m: {"sliding_window": m.get("attention.sliding_window")}, stretch=_stretched,
          experts=GgufExperts("num_local_experts", scores={1: "softmax", 3: "softmax of the chosen"}),
          ollama=Ollama("gptoss", stretched="yarn", tensors=(
              (r"(blk\.\d+)\.attn_out\.", r"\1.attn_output."), (r"(blk\.\d+)\.ffn_norm\.", r"\1.post_attention_norm."),
              (r"(blk\.\d+)\.attn_sinks$", r"\1.attn_sinks.weight")))),),
    {"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight"},
    qkv="either", experts=ExpertModules(router="mlp.router", in_turns=True))
