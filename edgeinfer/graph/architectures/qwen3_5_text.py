"""Qwen3.5 and 3.6 (Alibaba): three layers of four with gated delta rules (arXiv 2412.06464), one with gated attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.hybrid import Mixer, delta_layer, every_fourth, read_delta, read_kinds
from ..builder.moe import moe
from ..config import ModelConfig
from ..families.family import Family, Gguf, Seeing
from ..families.gguf_hybrid import delta_fields
from ..families.pre_tokenizer import PreTokenizer
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..hf_config.wrappers import without_mrope
from ..recurrent import DELTA
from ..steps import HeadOrder
from ..tensors import Tensor
from ..weights import Source
from .gemma import norm

DEFAULTS = {
    "vocab_size": 248320, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 32768, "partial": (("partial_rotary_factor",), 0.25), "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
KINDS = {"linear_attention": DELTA, "full_attention": "attention"}
SILU = ("silu", "swish")
_OF_DRAFTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def read(c: ConfigReader) -> ModelConfig:
    """Each fourth layer has attention, or those that `layer_types` says."""
    return read_hybrid(c, DEFAULTS)


def read_hybrid(c: ConfigReader, defaults: dict[str, Any], **own: Any) -> ModelConfig:
    """Read the fields that the dense model and those with experts share; layers that draft are left out."""
    if c.flag("attn_output_gate", True) is False:
        raise c.unsupported("attn_output_gate", False, "models of the family have the gate")
    c.choice("hidden_act", c.get("hidden_act") or "silu", SILU)  # which is that of convolutions and gates, too
    c.choice("mamba_ssm_dtype", c.get("mamba_ssm_dtype") or "float32", ("float32",))
    for name in _OF_DRAFTS:
        c.get(name)
    kinds = read_kinds(c, KINDS, every_fourth(c))
    delta = read_delta(c, tuple(i for i, kind in enumerate(kinds) if kind == DELTA), defaults)
    bias, plain = c.flag("attention_bias"), c.instead(**without_mrope(c.items()))
    return read_decoder(plain, defaults, attention_bias=bias, attention_output_bias=bias, recurrent=delta,
                        attention_gate=True, **own)


def mixer(c: ModelConfig, hf: str) -> Mixer:
    """The tensors of a delta rule."""
    r, d = c.recurrent, c.hidden_size
    assert r
    rows = (("qkv", r.conv_channels), ("z", r.value_width), ("b", r.heads), ("a", r.heads))
    return Mixer(tuple(Source(f"{hf}in_proj_{part}.weight", (width, d)) for part, width in rows),
                 (Source(hf + "conv1d.weight", (r.conv_channels, 1, r.conv_width)),), hf + "A_log", hf + "dt_bias",
                 hf + "norm.weight", hf + "out_proj.weight")


def forward(g: GraphBuilder, c: ModelConfig, parts: Callable[[ModelConfig, str], Mixer] = mixer) -> Graph:
    """Tokens to logits; `parts` has the tensors of a layer's delta rule."""
    return llama_like(g, c, block, norm("model.norm", c.hidden_size), parts=parts)


def block(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, parts: Callable[[ModelConfig, str], Mixer] = mixer
          ) -> Tensor:
    """Add one layer; the draft head, after the last layer, has attention."""
    x = mix(g, c, x, i, parts)
    return moe(g, c, x, i, norm=norm(f"model.layers.{i}.post_attention_layernorm", c.hidden_size))


def mix(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, parts: Callable[[ModelConfig, str], Mixer]) -> Tensor:
    """The first half of a block: x + the delta rule, or the attention, of norm(x)."""
    g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
    h = g.rms_norm(x, name + "attention_norm", norm(hf + "input_layernorm", c.hidden_size))
    if not c.recurrent or i not in c.recurrent.layers:
        return attend(g, c, h, x, name, hf + "self_attn.")
    return delta_layer(g, c, h, x, name, parts(c, hf + "linear_attn."))


def attend(g: GraphBuilder, c: ModelConfig, h: Tensor, x: Tensor, name: str, attn: str) -> Tensor:
    """x + the attention of h times a sigmoid; each head of the queries' matrix has a query, then a gate."""
    n, width = c.head_dim, c.query_width

    def rows(*end: int, kind: str = "weight") -> tuple[Source, ...]:
        q = Source(f"{attn}q_proj.{kind}", (2 * width, *end))
        k, v = (Source(f"{attn}{p}_proj.{kind}", (c.kv_width, *end)) for p in "kv")
        return q.every(2 * n, 0, n), k, v, q.every(2 * n, n, n)

    biases = rows(kind="bias") if c.attention_bias else ()
    qkv = g.linear(h, name + "qkv", rows(c.hidden_size), (width, c.kv_width, c.kv_width, width), bias=biases)
    qkv = g.rope_store(qkv, norm(attn + "q_norm", n), norm(attn + "k_norm", n))
    o = g.gated_norm(g.attention(qkv), qkv, "", "", start=width + 2 * c.kv_width, group=n, function="sigmoid")
    return g.linear(o, name + "o", (attn + "o_proj.weight",), (c.hidden_size,), residual=x,
                    bias=(attn + "o_proj.bias",) if c.attention_output_bias else ())


def order(c: ModelConfig, name: str) -> HeadOrder | None:
    """Value heads as files have them: the first of each key head, then the second of each."""
    r, part = c.recurrent, name.removeprefix("linear_attn.")
    if not r or part == name or r.heads == r.key_heads:
        return None
    each, width = r.heads // r.key_heads, 2 * r.key_width
    if part.startswith(("in_proj_qkv.", "conv1d.")):
        return HeadOrder(r.key_heads, each, r.value_dim, width)
    if part.startswith("in_proj_z."):
        return HeadOrder(r.key_heads, each, r.value_dim)
    if part.startswith("out_proj."):
        return HeadOrder(r.key_heads, each, r.value_dim, axis="columns")
    return HeadOrder(r.key_heads, each, 1) if part.startswith(("in_proj_", "A_log", "dt_bias")) else None


TENSORS = {"post_attention_layernorm": "post_attention_norm", "linear_attn.A_log": "ssm_a",
           "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
           "linear_attn.out_proj": "ssm_out", "linear_attn.in_proj_qkv": "attn_qkv",
           "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
           "linear_attn.in_proj_a": "ssm_alpha"}
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
"""Qwen2's pre-tokenizer, in which marks belong to letters."""
PICTURES = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys that say how pictures come in."""
FAMILY = Family((Gguf("qwen35", fields=delta_fields, rotated="share", ignored=PICTURES),), TENSORS, order=order,
                further_tokens=True, norms_plus_one=True, seeing=(Seeing("qwen3_5"),),
                pre_tokenizers={"qwen35": PreTokenizer((WORDS,))})
