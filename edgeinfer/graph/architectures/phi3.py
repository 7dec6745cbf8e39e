"""Phi-3, 3.5, 4 and 4-mini (arXiv 2404.14219, 2412.08905, 2503.01743): Llama with fused tensors and LongRoPE."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import gate_up_of, llama_like, rows_of
from ..builder.builder import GraphBuilder
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..tensors import Tensor
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000, "rms_norm_eps": 1e-5,
            "partial": (("partial_rotary_factor",), 1.0)}


def read(c: ConfigReader) -> ModelConfig:
    """One window for all layers; early files call LongRoPE su, or yarn with lists of factors."""
    for name in ("rope_scaling", "rope_parameters"):
        section = c.section(name)
        if section is not None and section.has("long_factor"):
            fields = section.items()
            kind = fields.get("rope_type", fields.get("type"))
            if kind in ("su", "yarn"):
                c = c.instead(**{name: {**fields, "rope_type": "longrope", "type": "longrope"}})
    c.own_code()
    for name in ("full_attn_mod", "interpolate_factor"):
        if c.integer(name, 1) != 1:
            raise c.unsupported(name, c.get(name), "only 1 is supported")
    window, layers = c.integer("sliding_window", None), c.integer("num_hidden_layers", high=2**12)
    return read_decoder(c, DEFAULTS, windows=(window,) * layers if window else ())


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """Llama's block; q, k and v are rows of one tensor, gate and up of another."""
    g.layer, hf, name, d = i, f"model.layers.{i}.", f"layers.{i}.", c.hidden_size
    qkv = Source(hf + "self_attn.qkv_proj.weight", (c.query_width + 2 * c.kv_width, d))
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    h = g.linear(h, name + "qkv", rows_of(qkv, c), (c.query_width, c.kv_width, c.kv_width))
    h = g.attention(g.rope_store(h))
    x = g.linear(h, name + "o", (hf + "self_attn.o_proj.weight",), (d,), residual=x)
    h = g.rms_norm(x, name + "ffn_norm", hf + "post_attention_layernorm.weight")
    return g.ffn(h, name, gate_up_of(hf + "mlp.", c), residual=x)


forward = partial(llama_like, block=layer)
FAMILY = Family(
    (Gguf("phi3", fields=lambda m: {"sliding_window": m.get("attention.sliding_window") or None}, rotated="share",
          strips=True,  # templates break lines after tokens, and it saw no such
          ignored=("rope.scaling.original_context_length", "rope.scaling.attn_factor")),),
    {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"})
