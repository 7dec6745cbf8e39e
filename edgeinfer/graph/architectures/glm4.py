"""GLM-4-0414 (Z.ai): norms before and after attention and FFN; half of each head turns, neighbours in pairs."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import gate_up_of, llama_like, neighbours_of
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor

VOCABULARY = 151552
DEFAULTS = {"vocab_size": VOCABULARY, "num_attention_heads": 32, "max_position_embeddings": 131072,
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625,
            "partial": (("partial_rotary_factor",), 0.5)}
ENDS = [151329, 151336, 151338]
"""Tokens that end a text where a config says none."""


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on queries, keys and values."""
    if not c.has("eos_token_id") and c.integer("vocab_size", VOCABULARY, high=2**22) > max(ENDS):
        c = c.instead(eos_token_id=ENDS)
    return read_decoder(c, DEFAULTS, attention_bias=c.flag("attention_bias", True))


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """x + norm(attention(norm(x))), then the same with the FFN; gate and up are rows of one tensor."""
    g.layer, hf, name, d = i, f"model.layers.{i}.", f"layers.{i}.", c.hidden_size
    attn, widths = hf + "self_attn.", (c.query_width, c.kv_width, c.kv_width)
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    h = g.linear(h, name + "qkv", neighbours_of(attn, "weight", c, d), widths,
                 bias=neighbours_of(attn, "bias", c) if c.attention_bias else ())
    h = g.linear(g.attention(g.rope_store(h)), name + "o", (attn + "o_proj.weight",), (d,))
    x = g.normed_sum(x, h, name + "attention_out_norm", hf + "post_self_attn_layernorm.weight")
    h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight")
    h = g.ffn(h, name, gate_up_of(hf + "mlp.", c))
    return g.normed_sum(x, h, name + "ffn_out_norm", hf + "post_mlp_layernorm.weight")


forward = partial(llama_like, block=layer)
FAMILY = Family((Gguf("glm4", rotated="share"),), {
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up"})
