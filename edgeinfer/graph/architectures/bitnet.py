"""BitNet b1.58 2B4T (arXiv 2504.12285): Llama with ternary matrices, squared ReLU, and norms in front of o and down.

Matrices are stored as codes of 2 bits (`quant_method: bitnet`, read by converters), or as the floats that training
rounds to such codes. GGUF's architecture of this name is another model's, with SiLU.
"""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from .llama import attend

__all__ = ["forward", "read"]
DEFAULTS = {"vocab_size": 128256, "intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 5,
            "hidden_act": "relu2", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "share_ignored": True}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections of the attention."""
    c.own_code()
    bias = c.flag("attention_bias")
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias)


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """One pre-norm block; the inputs of o and down are normed too."""
    hf, name = f"model.layers.{i}.", f"layers.{i}."
    mlp = hf + "mlp."
    x = attend(g, c, x, i, out_norm=hf + "self_attn.attn_sub_norm.weight")
    h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight")
    return g.ffn(h, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"), residual=x,
                 norm=mlp + "ffn_sub_norm.weight")


forward = partial(llama_like, block=layer)
