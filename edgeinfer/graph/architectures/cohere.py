"""Command-R (Cohere): attention and FFN side by side after one layer norm without a bias; neighbours turn in pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..builder.blocks import LLAMA_NAMES, Layer, gpt_like
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 8192, "bos_token_id": 5, "eos_token_id": 255001, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True}


def read(c: ConfigReader, theta: float = 500000.0, **own: Any) -> ModelConfig:
    """Logits times `logit_scale`; with `use_qk_norm` each head of q and k has a norm."""
    c.called(rms_norm_eps="layer_norm_eps")
    bias = c.flag("attention_bias")
    c.get("model_max_length")  # how long its makers let a text become
    scale = 1.0 if c.is_null("logit_scale") else c.number("logit_scale", 0.0625)
    return read_decoder(c, {**DEFAULTS, "rope_theta": theta}, attention_bias=bias, attention_output_bias=bias,
                        parallel_residual=True, logits_scale=scale, head_layer_norm=c.flag("use_qk_norm"), **own)


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors; rows of q and k are reordered, for our rotation turns halves."""
    attn, mlp = hf + "self_attn.", hf + "mlp."
    widths = {"q": c.query_width, "k": c.kv_width, "v": c.kv_width}

    def of(p: str, kind: str, *columns: int) -> Source:
        whole = Source(f"{attn}{p}_proj.{kind}", (widths[p], *columns))
        return whole if p == "v" else whole.rope_halves(c.head_dim)

    def norms(p: str) -> tuple[Source, ...]:
        whole = Source(f"{attn}{p}_norm.weight", (widths[p] // c.head_dim, c.head_dim))
        heads = range(whole.stored[0] if c.head_layer_norm else 0)
        return tuple(whole.item(i).rope_halves(c.head_dim) for i in heads)  # as the rows that they norm

    return Layer(
        q_norm=norms("q"), k_norm=norms("k"),
        norm=hf + "input_layernorm", norm_bias=False, qkv=tuple(of(p, "weight", c.hidden_size) for p in "qkv"),
        qkv_bias=tuple(of(p, "bias") for p in "qkv") if c.attention_bias else (), o=attn + "o_proj.weight",
        o_bias=(attn + "o_proj.bias",) if c.attention_output_bias else (), gate=mlp + "gate_proj", up=mlp + "up_proj",
        down=mlp + "down_proj")


def _fields(m: GgufMetadata) -> dict[str, Any]:
    return {"logit_scale": m.get("logit_scale"), "use_qk_norm": "blk.0.attn_q_norm.weight" in m.tensors}


forward = partial(gpt_like, parts=parts, norm_bias=False, **LLAMA_NAMES)
FAMILY = Family((Gguf("command-r", fields=_fields, tied=True),))
