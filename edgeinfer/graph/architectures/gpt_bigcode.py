"""GPT-BigCode, StarCoder 1 (arXiv 2301.03988, 2305.06161): GPT-2 with one head of keys and values for all queries."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import GPT_NAMES, Layer, gpt_like, heads_of, rows_of
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source
from .gpt2 import TENSORS

DEFAULTS = {"vocab_size": 50257, "max_position_embeddings": 1024, "bos_token_id": 50256, "eos_token_id": 50256,
            "rotary": False, "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "ffn_times": 4,
            "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """Sizes by GPT-2's names; without `scale_attn_weights` scores are not divided."""
    c.called(**GPT_NAMES)
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner",
                 "validate_runner_input", "pre_allocate_kv_cache", "pad_key_length", "max_sequence_length",
                 "max_batch_size"):
        c.get(name)  # in which type it is calculated, and how its makers ran it
    one, heads = c.flag("multi_query", True), c.integer("num_attention_heads", high=2**12)
    kv = 1 if one else heads
    if c.integer("num_key_value_heads", kv) != kv:
        raise c.unsupported("num_key_value_heads", c.get("num_key_value_heads"), f"with this multi_query it is {kv}")
    return read_decoder(c.instead(num_key_value_heads=kv), DEFAULTS, attention_bias=True, attention_output_bias=True,
                        mlp_bias=True, attention_scale=0.0 if c.flag("scale_attn_weights", True) else 1.0)


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors; rows of q, k and v alternate by head unless all queries share one key and value."""
    attn, mlp, rows = hf + "attn.", hf + "mlp.", c.query_width + 2 * c.kv_width
    split = rows_of if c.num_key_value_heads == 1 else heads_of
    weight, bias = Source(attn + "c_attn.weight", (rows, c.hidden_size)), Source(attn + "c_attn.bias", (rows,))
    return Layer(
        norm=hf + "ln_1", ffn_norm=hf + "ln_2", qkv=split(weight, c), qkv_bias=split(bias, c),
        o=attn + "c_proj.weight", o_bias=(attn + "c_proj.bias",), up=mlp + "c_fc.weight", down=mlp + "c_proj.weight",
        ffn_bias=(mlp + "c_fc.bias", mlp + "c_proj.bias"))


forward = partial(gpt_like, parts=parts)
FAMILY = Family((Gguf("starcoder", fields=lambda m: {"multi_query": m.config.get("num_key_value_heads") == 1},
                      fixed_fields={"hidden_act": "gelu_pytorch_tanh"}, rotated="none"),), TENSORS,
                qkv="rows", prefix="transformer.")
