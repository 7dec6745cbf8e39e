"""Bamba (IBM, Princeton, CMU and UIUC): Mamba 2 (arXiv 2405.21060), and attention with partial rotation in some layers.
"""

from __future__ import annotations

from ..builder.builder import GraphBuilder
from ..builder.hybrid import mamba, read_scan, scan_layer
from ..config import ModelConfig
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import attend

DEFAULTS = {"vocab_size": 128000, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144, "bos_token_id": 1, "eos_token_id": 2, "mamba_n_heads": 128,
            "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
            "partial": (("partial_rotary_factor",), 0.5)}


def read(c: ConfigReader) -> ModelConfig:
    """`attn_layer_indices` lists the layers that have attention."""
    layers, whole = c.integer("num_hidden_layers", high=2**12), c.get("attn_layer_indices") or []
    if not isinstance(whole, list) or not all(type(i) is int and 0 <= i < layers for i in whole):
        raise c.unsupported("attn_layer_indices", whole, f"it must list layers from 0 to {layers - 1}")
    for name in ("attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types"):
        c.get(name)  # which follow from the others, or change nothing of a text
    c.choice("hidden_act", c.get("hidden_act") or "silu", ("silu", "swish"))  # which is that of convolutions, too
    width = c.integer("mamba_expand", 2, high=64) * c.integer("hidden_size", high=2**17)
    bias = c.flag("mamba_proj_bias")
    scan = read_scan(c, tuple(i for i in range(layers) if i not in whole), DEFAULTS, width, in_bias=bias, out_bias=bias)
    bias = c.flag("attention_bias")
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=c.flag("mlp_bias"),
                        recurrent=scan)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
        if c.recurrent and i in c.recurrent.layers:
            h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
            x = scan_layer(g, c, h, x, name, mamba(c, hf + "mamba."))
        else:
            x = attend(g, c, x, i)
        h, mlp = g.rms_norm(x, name + "ffn_norm", hf + "pre_ff_layernorm.weight"), hf + "feed_forward."
        x = g.ffn(h, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"), residual=x, bias=c.mlp_bias)
    return g.build(g.logits(x, "model.final_layernorm.weight", "lm_head.weight"))
