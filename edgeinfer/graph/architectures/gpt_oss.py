"""gpt-oss (OpenAI, arXiv 2508.10925): attention with sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from ...errors import CheckpointError
from ..common import read_decoder, read_sliding
from ..config import ExpertsConfig, ModelConfig
from ..mixture import count_experts
from ..reader import ConfigReader
from .mixtral import forward

__all__ = ["forward", "read"]

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}
"""The rotation of configs that say none."""
ALPHA, LIMIT = 1.702, 7.0


def read(c: ConfigReader) -> ModelConfig:
    """A window in every second layer, from the first on; the activation is its own, whatever `hidden_act` says."""
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
