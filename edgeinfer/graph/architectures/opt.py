"""OPT (arXiv 2205.01068): layer norms, learned positions, and an FFN without a gate whose activation is ReLU."""

from __future__ import annotations

from ..blocks import Layer, layer
from ..builder import GraphBuilder
from ..common import read_decoder
from ..config import ModelConfig
from ..graph import Graph
from ..reader import ConfigReader

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 2, "rotary": False,
            "rms_norm_eps": 1e-5, "hidden_act": "relu", "tie_word_embeddings": True}
OFFSET = 2
"""Rows of the table of positions before that of the first."""


def read(c: ConfigReader) -> ModelConfig:
    """Norms before attention and FFN alone, and embeddings as wide as the stream."""
    c.called(intermediate_size="ffn_dim", hidden_act="activation_function")
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not c.flag(name, True):
            raise c.unsupported(name, False, "only true is supported")
    width = c.integer("word_embed_proj_dim", c.integer("hidden_size", high=2**17))
    if width != c.integer("hidden_size", high=2**17):
        raise c.unsupported("word_embed_proj_dim", width, "it must be hidden_size")
    bias = c.flag("enable_bias", True)
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=bias)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    hf = "model.decoder."
    x = g.add_positions(g.embed(hf + "embed_tokens.weight"), hf + "embed_positions.weight", OFFSET)
    for i in range(c.num_hidden_layers):
        x = layer(g, c, x, i, parts(c, f"{hf}layers.{i}."))
    return g.build(g.logits(x, hf + "final_layer_norm.weight", "lm_head.weight", layer_norm=True,
                            norm_bias=hf + "final_layer_norm.bias"))


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors."""
    attn, bias = hf + "self_attn.", c.attention_bias
    return Layer(
        norm=hf + "self_attn_layer_norm", ffn_norm=hf + "final_layer_norm", o=attn + "out_proj.weight",
        qkv=tuple(attn + p + "_proj.weight" for p in "qkv"),
        qkv_bias=tuple(attn + p + "_proj.bias" for p in "qkv") if bias else (),
        o_bias=(attn + "out_proj.bias",) if bias else (), up=hf + "fc1.weight", down=hf + "fc2.weight",
        ffn_bias=(hf + "fc1.bias", hf + "fc2.bias") if bias else ())
