"""Llama 2 and 3, TinyLlama, SmolLM2 (arXiv 2307.09288, 2407.21783): grouped-query attention and a gated FFN."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections of the attention, `mlp_bias` on all three of the FFN.

    Whole heads turn whatever `partial_rotary_factor` says, as in transformers (5.23), whose Llama reads it only where a
    rotation is stretched, and then fails.
    """
    bias = c.flag("attention_bias")
    return read_decoder(c, {**DEFAULTS, "share_ignored": True}, attention_bias=bias, attention_output_bias=bias,
                        mlp_bias=c.flag("mlp_bias"))


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, qk_norm: bool = False) -> Tensor:
    """One pre-norm block: attention and FFN, each added to the residual stream."""
    x = attend(g, c, x, i, qk_norm)
    hf, name = f"model.layers.{i}.", f"layers.{i}."
    mlp = hf + "mlp."
    h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight")
    return g.ffn(h, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"), residual=x, bias=c.mlp_bias)


def attend(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, qk_norm: bool = False, wide_norm: bool = False,
           out_norm: str = "") -> Tensor:
    """The first half of a block; norms of queries and keys are those of each head, or wide: of all heads as one.

    `out_norm` names a norm of the output of all heads.
    """
    hf, name = f"model.layers.{i}.", f"layers.{i}."
    attn = hf + "self_attn."
    g.layer = i
    qkv = tuple(attn + p for p in ("q_proj", "k_proj", "v_proj"))
    widths = (c.query_width, c.kv_width, c.kv_width)

    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    h = g.linear(h, name + "qkv", weights(qkv), widths, bias=biases(qkv) if c.attention_bias else ())
    if wide_norm:
        h = g.norm_part(h, name + "q_norm", attn + "q_norm.weight", 0, c.query_width)
        h = g.norm_part(h, name + "k_norm", attn + "k_norm.weight", c.query_width, c.kv_width)
    h = g.rope_store(h, *((attn + "q_norm.weight", attn + "k_norm.weight") if qk_norm else ()))
    h = g.attention(h, attn + "sinks" if c.attention_sinks else "")
    h = g.rms_norm(h, name + "o_norm", out_norm) if out_norm else h
    return g.linear(h, name + "o", (attn + "o_proj.weight",), (c.hidden_size,), residual=x,
                    bias=(attn + "o_proj.bias",) if c.attention_output_bias else ())


def weights(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Checkpoint names of the modules' weights."""
    return tuple(m + ".weight" for m in modules)


def biases(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Checkpoint names of the modules' biases."""
    return tuple(m + ".bias" for m in modules)


forward = partial(llama_like, block=layer)
GGUF = Gguf("llama", rotated="count")
FAMILY = Family((GGUF,), neighbours=True, ffn_biases=True)
