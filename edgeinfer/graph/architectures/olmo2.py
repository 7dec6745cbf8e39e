"""OLMo 2 (arXiv 2501.00656): Llama that norms the outputs of attention and FFN, not inputs, and all heads as one."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import NORMS_ON_THE_WAY_OUT, Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from .llama import biases, weights

DEFAULTS = {"max_position_embeddings": 2048, "eos_token_id": 50279, "rms_norm_eps": 1e-5}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections of the attention."""
    bias = c.flag("attention_bias")
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias)


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, head_norms: bool = False) -> Tensor:
    """One block: x + norm(attention(x)), then the same with the FFN; norms of q and k are wide, or of each head."""
    g.layer, hf, name = i, f"model.layers.{i}.", f"layers.{i}."
    attn, mlp = hf + "self_attn.", hf + "mlp."
    qkv, out = tuple(attn + p for p in ("q_proj", "k_proj", "v_proj")), (attn + "o_proj",)
    widths = (c.query_width, c.kv_width, c.kv_width)
    h = g.linear(x, name + "qkv", weights(qkv), widths, biases(qkv) if c.attention_bias else ())
    norms = (attn + "q_norm.weight", attn + "k_norm.weight")
    if not head_norms:
        h = g.norm_part(h, name + "q_norm", norms[0], 0, c.query_width)
        h = g.norm_part(h, name + "k_norm", norms[1], c.query_width, c.kv_width)
    h = g.attention(g.rope_store(h, *(norms if head_norms else ())))
    h = g.linear(h, name + "o", weights(out), (c.hidden_size,), biases(out) if c.attention_output_bias else ())
    x = g.normed_sum(x, h, name + "attention_out_norm", hf + "post_attention_layernorm.weight")
    h = g.ffn(x, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"))
    return g.normed_sum(x, h, name + "ffn_out_norm", hf + "post_feedforward_layernorm.weight")


forward = partial(llama_like, block=layer)
GGUF = Gguf("olmo2", ignored=("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"))
FAMILY = Family((GGUF,), NORMS_ON_THE_WAY_OUT)
