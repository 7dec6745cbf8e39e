"""ERNIE 4.5 0.3B (Baidu): Llama whose neighbours turn in pairs, and one flag for the biases of all matrices."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like, neighbours_of
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor

DEFAULTS = {"vocab_size": 103424, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 1,
            "eos_token_id": 2, "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """`use_bias` puts a bias on all projections of attention and FFN."""
    c.own_code()
    bias = c.flag("use_bias")
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=bias)


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """Llama's block; rows of q and k are reordered, for our rotation turns halves."""
    g.layer, hf, name, d = i, f"model.layers.{i}.", f"layers.{i}.", c.hidden_size
    attn, mlp = hf + "self_attn.", hf + "mlp."
    widths = (c.query_width, c.kv_width, c.kv_width)
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    h = g.linear(h, name + "qkv", neighbours_of(attn, "weight", c, d), widths,
                 bias=neighbours_of(attn, "bias", c) if c.attention_bias else ())
    h = g.attention(g.rope_store(h))
    x = g.linear(h, name + "o", (attn + "o_proj.weight",), (d,), residual=x,
                 bias=(attn + "o_proj.bias",) if c.attention_output_bias else ())
    h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight")
    return g.ffn(h, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"), residual=x, bias=c.mlp_bias)


forward = partial(llama_like, block=layer)
FAMILY = Family((Gguf("ernie4_5"),))
