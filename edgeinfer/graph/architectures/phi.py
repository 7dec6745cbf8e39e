"""Phi-1, 1.5 and 2 (arXiv 2306.11644, 2309.05463): attention and FFN side by side after one layer norm, biases."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import LLAMA_NAMES, Layer, gpt_like
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import biases, weights

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new", "partial": (("partial_rotary_factor",), 0.5)}


def read(c: ConfigReader) -> ModelConfig:
    """All matrices have a bias, the head too; with `qk_layernorm` heads are normed, all of q with one weight."""
    c.own_code()
    c.called(rms_norm_eps="layer_norm_eps")
    return read_decoder(c, DEFAULTS, attention_bias=True, attention_output_bias=True, mlp_bias=True,
                        parallel_residual=True, head_bias=True, head_layer_norm=c.flag("qk_layernorm"))


def parts(c: ModelConfig, hf: str) -> Layer:
    """Name a layer's tensors."""
    attn, mlp = hf + "self_attn.", hf + "mlp."
    qkv = tuple(attn + p for p in ("q_proj", "k_proj", "v_proj"))
    normed = tuple(attn + p for p in ("q_layernorm", "k_layernorm")) if c.head_layer_norm else ()
    return Layer(
        norm=hf + "input_layernorm", qkv=weights(qkv), qkv_bias=biases(qkv), o=attn + "dense.weight",
        o_bias=(attn + "dense.bias",), up=mlp + "fc1.weight", down=mlp + "fc2.weight",
        ffn_bias=(mlp + "fc1.bias", mlp + "fc2.bias"), q_norm=weights(normed[:1]), k_norm=weights(normed[1:]),
        head_norm_bias=biases(normed))


forward = partial(gpt_like, parts=parts, head_bias=True, **{**LLAMA_NAMES, "norm": "model.final_layernorm"})
FAMILY = Family((Gguf("phi2", fixed_fields={"hidden_act": "gelu_new"}, rotated="share"),), {
    "model.final_layernorm": "output_norm", "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down"}, qkv="either")
