"""Gemma (arXiv 2403.08295): Llama with norms stored as their difference from 1, and scaled embeddings."""

from __future__ import annotations

from math import sqrt
from typing import Any

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from ..weights import Source
from .llama import biases, weights

DEFAULTS = {"max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "bos_token_id": 2,
            "eos_token_id": 1, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}


def read(c: ConfigReader) -> ModelConfig:
    """Early files say gelu and mean its tanh form."""
    return read_gemma(c, DEFAULTS)


def read_gemma(c: ConfigReader, defaults: dict[str, Any], **own: Any) -> ModelConfig:
    """Read the fields that all generations share."""
    if c.has("hidden_activation"):
        c.get("hidden_act")  # which the newer name replaces
        c.called(hidden_act="hidden_activation")
    if c.get("hidden_act") == "gelu":
        c = c.instead(hidden_act="gelu_pytorch_tanh")
    if c.get("use_bidirectional_attention"):
        raise c.unsupported("use_bidirectional_attention", True, "tokens that see what comes after them are none that "
                            "a text is made of")
    bias, hidden = c.flag("attention_bias"), c.integer("hidden_size", high=2**17)
    c.get("cache_implementation")  # about the storage of a cache, not its contents
    return read_decoder(c, defaults, attention_bias=bias, attention_output_bias=bias, embedding_scale=sqrt(hidden),
                        **own)


def norm(name: str, width: int) -> Source:
    """Return the source of a norm's weight, 1 + the stored tensor."""
    return Source(name + ".weight", (width,)).plus(1.0)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    return llama_like(g, c, layer, norm("model.norm", c.hidden_size))


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, sandwich: bool = False, qk_norm: bool = False) -> Tensor:
    """One block; in a `sandwich` attention and FFN are normed on their way out, too."""
    g.layer, hf, name, d = i, f"model.layers.{i}.", f"layers.{i}.", c.hidden_size
    attn, mlp = hf + "self_attn.", hf + "mlp."
    qkv = tuple(attn + p for p in ("q_proj", "k_proj", "v_proj"))
    before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    norms = (norm(attn + "q_norm", c.head_dim), norm(attn + "k_norm", c.head_dim)) if qk_norm else ()

    h = g.rms_norm(x, name + "attention_norm", norm(hf + "input_layernorm", d))
    widths = (c.query_width, c.kv_width, c.kv_width)
    h = g.linear(h, name + "qkv", weights(qkv), widths, biases(qkv) if c.attention_bias else ())
    h = g.attention(g.rope_store(h, *norms))
    out = (attn + "o_proj",)
    h = g.linear(h, name + "o", weights(out), (d,), biases(out) if c.attention_output_bias else (),
                 residual=None if sandwich else x)
    if sandwich:
        h = g.normed_sum(x, h, name + "attention_out_norm", norm(hf + "post_attention_layernorm", d))
    x, h = h, g.rms_norm(h, name + "ffn_norm", norm(hf + before, d))
    modules = (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj")
    if not sandwich:
        return g.ffn(h, name, modules, residual=x)
    return g.normed_sum(x, g.ffn(h, name, modules), name + "ffn_out_norm", norm(hf + "post_feedforward_layernorm", d))


GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def gguf_fields(m: GgufMetadata, largest: int) -> dict[str, Any]:
    """Fields of the second and third generation; in the model of `largest` layers scores are divided otherwise."""
    wide = m.size("hidden_size") // m.size("num_attention_heads")
    whole = m.size("num_hidden_layers") == largest
    return {"query_pre_attn_scalar": wide if whole else m.config.get("head_dim", 256),
            "sliding_window": m.get("attention.sliding_window"),
            "final_logit_softcapping": m.get("final_logit_softcapping")}


FAMILY = Family((Gguf("gemma", fixed_fields=GELU, tied=True),), norms_plus_one=True)
