"""StarCoder2 (arXiv 2402.19173): grouped-query attention with layer norms, biases, and an FFN without a gate."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import LLAMA_NAMES, Layer, gpt_like
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import biases, weights

DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 2, "bos_token_id": 50256, "eos_token_id": 50256,
            "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """One window for all layers, and one flag for all biases."""
    c.called(rms_norm_eps="norm_epsilon")
    for name, value in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        c.choice(name, c.get(name, value), (value,))
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        c.get(name)  # in which type it is calculated
    if not c.flag("scale_attn_weights", True):
        raise c.unsupported("scale_attn_weights", False, "only true is supported")
    bias, window = c.flag("use_bias", True), c.integer("sliding_window", None)
    layers = c.integer("num_hidden_layers", high=2**12)
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=bias,
                        windows=(window,) * layers if window else ())


def parts(c: ModelConfig, hf: str) -> Layer:
    """Name a layer's tensors."""
    attn, mlp, bias = hf + "self_attn.", hf + "mlp.", c.attention_bias
    qkv = tuple(attn + p for p in ("q_proj", "k_proj", "v_proj"))
    return Layer(
        norm=hf + "input_layernorm", ffn_norm=hf + "post_attention_layernorm", qkv=weights(qkv),
        qkv_bias=biases(qkv) if bias else (), o=attn + "o_proj.weight",
        o_bias=(attn + "o_proj.bias",) if bias else (), up=mlp + "c_fc.weight", down=mlp + "c_proj.weight",
        ffn_bias=(mlp + "c_fc.bias", mlp + "c_proj.bias") if bias else ())


forward = partial(gpt_like, parts=parts, **LLAMA_NAMES)
FAMILY = Family((Gguf("starcoder2", fields=lambda m: {"sliding_window": m.get("attention.sliding_window") or None},
                      fixed_fields={"hidden_act": "gelu_pytorch_tanh"}),),
                {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"})
