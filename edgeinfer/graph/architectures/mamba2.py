"""Mamba 2 (arXiv 2405.21060): layers that scan, and nothing else."""

from __future__ import annotations

from typing import Any

from ..builder.builder import GraphBuilder
from ..builder.hybrid import mamba, read_scan, scan_layer
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_hybrid import TENSORS_OF_SCAN, scan_fields
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader

LONGEST = 2**20
DEFAULTS = {"vocab_size": 32768, "rms_norm_eps": 1e-5, "max_position_embeddings": LONGEST, "bos_token_id": 0,
            "eos_token_id": 2, "rotary": False, "mamba_n_heads": 128, "mamba_n_groups": 8, "mamba_d_state": 128,
            "mamba_d_conv": 4}
NAMES = {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_d_state": "state_size",
         "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
         "mamba_chunk_size": "chunk_size", "mamba_proj_bias": "use_bias", "rms_norm_eps": "layer_norm_epsilon"}
"""Names of the fields that other models have under those of Bamba."""
_UNUSED = """time_step_rank time_step_min time_step_max time_step_floor residual_in_fp32 rescale_prenorm_residual
    norm_before_gate rms_norm layer_types""".split()
NO_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1, "head_dim": 2}
"""Sizes that a config must have, of parts that no layer has."""


def read(c: ConfigReader) -> ModelConfig:
    """Heads are those of the scan; texts may be as long as wanted, `max_position_embeddings` is a default for runs."""
    for name in _UNUSED:
        c.get(name)
    c.called(**NAMES)
    c.choice("hidden_act", c.get("hidden_act") or "silu", ("silu", "swish"))  # which is that of convolutions
    width = c.integer("expand", 2, high=64) * c.integer("hidden_size", high=2**17)
    bias, layers = c.flag("mamba_proj_bias"), c.integer("num_hidden_layers", high=2**12)
    scan = read_scan(c, tuple(range(layers)), DEFAULTS, width, in_bias=bias, out_bias=bias)
    return read_decoder(c.instead(**NO_ATTENTION), DEFAULTS, recurrent=scan)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embeddings.weight")
    for i in range(c.num_hidden_layers):
        g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
        x = scan_layer(g, c, g.rms_norm(x, name + "norm", hf + "norm.weight"), x, name, mamba(c, hf + "mixer."))
    return g.build(g.logits(x, "model.norm_f.weight", "lm_head.weight"))


def _fields(m: GgufMetadata) -> dict[str, Any]:
    width = m.get("ssm.inner_size") or 0
    return {**scan_fields(m), "expand": max(width // m.size("hidden_size"), 1)}


TENSORS = {**{f"mixer.{name}": own for name, own in TENSORS_OF_SCAN.items()}, "norm": "attn_norm",
           "model.embeddings": "token_embd", "model.norm_f": "output_norm"}
FAMILY = Family((Gguf("mamba2", fields=_fields),), TENSORS, otherwise="backbone.")
