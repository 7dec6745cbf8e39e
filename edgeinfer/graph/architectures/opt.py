"""OPT (arXiv 2205.01068): layer norms, learned positions, and an FFN without a gate whose activation is ReLU."""

from __future__ import annotations

from ..builder.blocks import Layer, layer, normed_layer
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import Family
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 2, "rotary": False,
            "rms_norm_eps": 1e-5, "hidden_act": "relu", "tie_word_embeddings": True}
OFFSET = 2
"""Rows of the table of positions before that of the first."""


def read(c: ConfigReader) -> ModelConfig:
    """350M has embeddings of another width than the stream, and norms after attention and FFN."""
    c.called(intermediate_size="ffn_dim", hidden_act="activation_function")
    if not c.flag("layer_norm_elementwise_affine", True):
        raise c.unsupported("layer_norm_elementwise_affine", False, "only true is supported")
    before, hidden = c.flag("do_layer_norm_before", True), c.integer("hidden_size", high=2**17)
    width = c.integer("word_embed_proj_dim", hidden, high=2**17)
    bias = c.flag("enable_bias", True)
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=bias,
                        embedding_dim=0 if width == hidden else width, norms_behind=not before,
                        final_norm=before and not c.flag("_remove_final_layer_norm"))


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    hf, narrow = "model.decoder.", bool(c.embedding_dim)
    x = g.embed(hf + "embed_tokens.weight")
    if narrow:
        x = g.linear(x, "project_in", (hf + "project_in.weight",), (c.hidden_size,))
    x = g.add_positions(x, hf + "embed_positions.weight", OFFSET)
    for i in range(c.num_hidden_layers):
        x = (normed_layer if c.norms_behind else layer)(g, c, x, i, parts(c, f"{hf}layers.{i}."))
    norm = hf + "final_layer_norm" if c.final_norm else ""
    return g.build(g.logits(x, norm and norm + ".weight", "lm_head.weight", layer_norm=True,
                            norm_bias=norm and norm + ".bias", project=hf + "project_out.weight" if narrow else ""))


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors."""
    attn, bias = hf + "self_attn.", c.attention_bias
    return Layer(
        norm=hf + "self_attn_layer_norm", ffn_norm=hf + "final_layer_norm", o=attn + "out_proj.weight",
        qkv=tuple(attn + p + "_proj.weight" for p in "qkv"),
        qkv_bias=tuple(attn + p + "_proj.bias" for p in "qkv") if bias else (),
        o_bias=(attn + "out_proj.bias",) if bias else (), up=hf + "fc1.weight", down=hf + "fc2.weight",
        ffn_bias=(hf + "fc1.bias", hf + "fc2.bias") if bias else ())


FAMILY = Family(prefix="model.", ffn_biases=True)
