"""StableLM (arXiv 2402.17834): Llama with layer norms, a quarter of each head turning."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..builder.blocks import LLAMA_NAMES, Layer, gpt_like
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import biases, weights

DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 32, "bos_token_id": 0, "eos_token_id": 0,
            "rms_norm_eps": 1e-5, "partial": (("partial_rotary_factor", "rope_pct"), 0.25)}


def read(c: ConfigReader) -> ModelConfig:
    """Side by side, attention and FFN share a norm; with `qk_layernorm` each head of q and k has one of its own."""
    c.own_code()
    c.called(rms_norm_eps="layer_norm_eps" if c.has("layer_norm_eps") or not c.has("norm_eps") else "norm_eps")
    return read_decoder(c, DEFAULTS, attention_bias=c.flag("use_qkv_bias"),
                        parallel_residual=c.flag("use_parallel_residual"), head_layer_norm=c.flag("qk_layernorm"))


def parts(c: ModelConfig, hf: str) -> Layer:
    """Name a layer's tensors."""
    qkv = tuple(hf + "self_attn." + p for p in ("q_proj", "k_proj", "v_proj"))
    return Layer(
        norm=hf + "input_layernorm", ffn_norm="" if c.parallel_residual else hf + "post_attention_layernorm",
        q_norm=_head_norms(c, hf, "q"), k_norm=_head_norms(c, hf, "k"),
        qkv=weights(qkv), qkv_bias=biases(qkv) if c.attention_bias else (), o=hf + "self_attn.o_proj.weight",
        gate=hf + "mlp.gate_proj", up=hf + "mlp.up_proj", down=hf + "mlp.down_proj")


def _head_norms(c: ModelConfig, hf: str, part: str) -> tuple[str, ...]:
    """The weights of a layer's heads of q or k."""
    heads = c.num_attention_heads if part == "q" else c.num_key_value_heads
    return tuple(f"{hf}self_attn.{part}_layernorm.norms.{i}.weight" for i in range(heads if c.head_layer_norm else 0))


def _fields(m: GgufMetadata) -> dict[str, Any]:
    return {"use_parallel_residual": bool(m.get("use_parallel_residual")),
            "qk_layernorm": "blk.0.attn_q_norm.weight" in m.tensors}


forward = partial(gpt_like, parts=parts, **LLAMA_NAMES)
FAMILY = Family((Gguf("stablelm", fields=_fields, rotated="share"),))
