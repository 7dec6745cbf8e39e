"""Falcon (arXiv 2311.16867): attention and FFN side by side, and few heads of keys and values in one tensor with q.

Falcon-RW (arXiv 2306.01116) has ALiBi instead of a rotation. Its biases are rounded to bfloat16 as in training.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..builder.blocks import Layer, gpt_like, heads_of
from ..config import AlibiConfig, ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..families.pre_tokenizer import GPT2, PreTokenizer
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 11, "eos_token_id": 11, "rms_norm_eps": 1e-5,
            "hidden_act": "gelu", "ffn_times": 4, "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """Read the config; in the newer kind all layers are parallel, with two norms unless the config says one."""
    c.own_code()
    c.called(rms_norm_eps="layer_norm_epsilon", hidden_act="activation", intermediate_size="ffn_hidden_size",
             num_hidden_layers="n_layer" if c.has("n_layer") else "num_hidden_layers",
             num_attention_heads="n_head" if c.has("n_head") else "num_attention_heads")
    alibi = c.flag("alibi")
    newer, heads = c.flag("new_decoder_architecture"), c.integer("num_attention_heads", high=2**12)
    one, side, bias = c.flag("multi_query", True), c.flag("parallel_attn", True), c.flag("bias")
    kv = c.integer("num_kv_heads", heads, high=2**12) if newer else 1 if one else heads
    c.get("num_kv_heads")  # which only the newer kind follows
    norms = c.integer("num_ln_in_parallel_attn", 2 if newer else 1, high=2)
    if alibi:  # then nothing turns, whatever the file says of a rotation
        for name in ("rope_theta", "rope_scaling", "rope_parameters"):
            c.get(name)
    return read_decoder(c.instead(num_key_value_heads=kv), {**DEFAULTS, "rotary": not alibi}, attention_bias=bias,
                        attention_output_bias=bias, mlp_bias=bias, parallel_residual=newer or side,
                        parallel_norms=norms, alibi=AlibiConfig(bfloat16=True) if alibi else None)


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors."""
    attn, mlp, rows, bias = hf + "self_attention.", hf + "mlp.", c.query_width + 2 * c.kv_width, c.mlp_bias
    two = c.parallel_residual and c.parallel_norms == 2
    after = "" if c.parallel_residual else hf + "post_attention_layernorm"
    fused, biases = Source(attn + "query_key_value.weight", (rows, c.hidden_size)), attn + "query_key_value.bias"
    return Layer(
        norm=hf + ("ln_attn" if two else "input_layernorm"), ffn_norm=hf + "ln_mlp" if two else after,
        qkv=heads_of(fused, c), qkv_bias=heads_of(Source(biases, (rows,)), c) if bias else (),
        o=attn + "dense.weight", o_bias=(attn + "dense.bias",) if bias else (), up=mlp + "dense_h_to_4h.weight",
        down=mlp + "dense_4h_to_h.weight",
        ffn_bias=(mlp + "dense_h_to_4h.bias", mlp + "dense_4h_to_h.bias") if bias else ())


def _fields(m: GgufMetadata) -> dict[str, Any]:
    kv, heads = m.config.get("num_key_value_heads", 1), m.size("num_attention_heads")
    two = "blk.0.attn_norm_2.weight" in m.tensors
    return {"num_kv_heads": kv, "new_decoder_architecture": two or kv not in (1, heads), "multi_query": kv == 1,
            "num_ln_in_parallel_attn": 2 if two else 1, "num_key_value_heads": None}


forward = partial(gpt_like, parts=parts, embed="transformer.word_embeddings", positions="")
FAMILY = Family(
    (Gguf("falcon", fields=_fields, fixed_fields={"hidden_act": "gelu"}, ignored=("tensor_data_layout",)),),
    {"transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "ln_attn": "attn_norm_2",
     "ln_mlp": "attn_norm", "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
     "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"},
    qkv="rows", prefix="transformer.",
    pre_tokenizers={"falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))})
