"""LFM2 (Liquid AI, arXiv 2511.23404): gated convolutions over three tokens, and a few layers with attention."""

from __future__ import annotations

from typing import Any

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.hybrid import read_conv_width, read_kinds
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_hybrid import kv_heads
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..recurrent import CONV, RecurrentConfig
from ..tensors import Tensor
from ..weights import Source
from .llama import weights

DEFAULTS = {"vocab_size": 65536, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1e6,
            "max_position_embeddings": 128000, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True}
KINDS = {"conv": CONV, "short_conv": CONV, "full_attention": "attention"}
_OF_TRAINING = """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc""".split()
"""Fields of published configs that repeat others or describe the training; transformers does not read them either."""


def read(c: ConfigReader) -> ModelConfig:
    """`layer_types` says which layers have attention, or `full_attn_idxs` does; the FFN's size is adjusted."""
    for name in (*_OF_TRAINING, "intermediate_size"):  # block_ff_dim goes before it
        c.get(name)
    layers = c.integer("num_hidden_layers", high=2**12)
    whole = c.get("full_attn_idxs")
    whole = list(range(layers)) if whole is None else whole
    if not isinstance(whole, list) or not all(type(i) is int and 0 <= i < layers for i in whole):
        raise c.unsupported("full_attn_idxs", whole, f"it must list layers from 0 to {layers - 1}")
    c.called(intermediate_size="block_ff_dim" if c.has("block_ff_dim") else "intermediate_size")
    size = c.integer("intermediate_size", 12288, high=2**20)
    times, step = c.number("block_ffn_dim_multiplier", 1.0), c.integer("block_multiple_of", 256, high=2**20)
    if c.flag("block_auto_adjust_ff_dim", True):
        size = -(-int(times * int(2 * size / 3)) // step) * step
    types = ["full_attention" if i in whole else "conv" for i in range(layers)]
    return read_lfm2(c.instead(**{"block_ff_dim" if c.has("block_ff_dim") else "intermediate_size": size}), types)


def read_lfm2(c: ConfigReader, types: list[str], **own: Any) -> ModelConfig:
    """Read the fields that the dense model and the one with experts share."""
    c.called(rms_norm_eps="norm_eps", **({"tie_word_embeddings": "tie_embedding"} if c.has("tie_embedding") else {}))
    kinds, bias = read_kinds(c, KINDS, types), c.flag("conv_bias")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == CONV)
    width = read_conv_width(c, "conv_L_cache", 3)
    conv = RecurrentConfig(CONV, layers, width, conv_bias=bias) if layers else None
    return read_decoder(c, DEFAULTS, recurrent=conv, **own)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    return llama_like(g, c, lambda g, c, x, i: ffn(g, mix(g, c, x, i), i), "model.embedding_norm.weight")


def mix(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """The first half of a block: x + the convolution, or the attention, of norm(x)."""
    g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
    h = g.rms_norm(x, name + "attention_norm", hf + "operator_norm.weight")
    if c.recurrent and i in c.recurrent.layers:
        return convolve(g, c, h, x, i)
    attn = hf + "self_attn."
    qkv = tuple(attn + p for p in ("q_proj", "k_proj", "v_proj"))
    h = g.linear(h, name + "qkv", weights(qkv), (c.query_width, c.kv_width, c.kv_width))
    h = g.attention(g.rope_store(h, attn + "q_layernorm.weight", attn + "k_layernorm.weight"))
    return g.linear(h, name + "o", (attn + "out_proj.weight",), (c.hidden_size,), residual=x)


def convolve(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, i: int) -> Tensor:
    """x + W (C * convolution(B * x')), where B, C and x' are made of h."""
    r, d, name, hf = c.recurrent, c.hidden_size, f"layers.{i}.", f"model.layers.{i}.conv."
    assert r

    def bias(module: str) -> tuple[str, ...]:
        return (f"{hf}{module}.bias",) if r and r.conv_bias else ()

    rows = g.linear(h, name + "mixer_in", (hf + "in_proj.weight",), (3 * d,), bias=bias("in_proj"))
    kernel = Source(hf + "conv.weight", (d, 1, r.conv_width))
    h = g.causal_conv(rows, name + "conv", (kernel,), start=2 * d, gate_in=0, gate_out=d, bias="".join(bias("conv")))
    return g.linear(h, name + "mixer_out", (hf + "out_proj.weight",), (d,), bias=bias("out_proj"), residual=x)


def ffn(g: GraphBuilder, x: Tensor, i: int) -> Tensor:
    """The second half: x + FFN(norm(x))."""
    name, hf = f"layers.{i}.", f"model.layers.{i}."
    h = g.rms_norm(x, name + "ffn_norm", hf + "ffn_norm.weight")
    return g.ffn(h, name, (hf + "feed_forward.w1", hf + "feed_forward.w3", hf + "feed_forward.w2"), residual=x)


def gguf_fields(m: GgufMetadata) -> dict[str, Any]:
    """Layers without key-value heads have convolutions; FFNs have the size that they have."""
    heads, n = kv_heads(m)
    has = {name.split(".", 2)[-1] for name in m.tensors}
    return {"num_key_value_heads": n, "layer_types": ["full_attention" if each else "conv" for each in heads],
            "conv_L_cache": m.get("shortconv.l_cache"), "conv_bias": "shortconv.conv.bias" in has}


def _dense(m: GgufMetadata) -> dict[str, Any]:
    return {**gguf_fields(m), "block_auto_adjust_ff_dim": False}


TENSORS = {"operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.in_proj": "shortconv.in_proj",
           "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
           "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
           "self_attn.out_proj": "attn_output", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
           "feed_forward.w2": "ffn_down", "model.embedding_norm": "token_embd_norm"}
FAMILY = Family((Gguf("lfm2", fields=_dense, tied=True),), TENSORS)
