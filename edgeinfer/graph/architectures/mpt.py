"""MPT (MosaicML, 2023): ALiBi, layer norms without biases, and q, k and v fused in one tensor."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import Layer, gpt_like, rows_of
from ..config import AlibiConfig, ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None, "rotary": False,
            "rms_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True}
MAX_BIAS = 8.0
ATTENTION_OFF = {"attn_type": ("multihead_attention",), "alibi_bias_max": (8,)}
"""Fields of attn_config beside those that are off: values under which it is that of the MPT models."""
OFF = {"norm_type": ("low_precision_layernorm", "layernorm"), "embedding_fraction": (1,), "no_bias": (True,),
       "logit_scale": (None,)}
"""The same of the config itself."""


def read(c: ConfigReader) -> ModelConfig:
    """Read sizes by MPT's own names, and refuse attention that is not the published models'.

    transformers has ALiBi and a bias_max of 8 whatever attn_config says, so other values are refused.
    """
    c.own_code()
    c.called(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
             max_position_embeddings="max_seq_len", rms_norm_eps="layer_norm_epsilon")
    times = c.integer("expansion_ratio", 4, high=64)
    max_bias = c.number("alibi_bias_max", MAX_BIAS, high=64.0)  # of GGUF's metadata
    scale = None
    if attention := c.section("attn_config"):
        for name in ("attn_impl", "attn_pdrop", "model_type", "attn_uses_sequence_id", "prefix_lm"):
            attention.get(name)
        if not attention.flag("alibi", True):
            raise attention.unsupported("alibi", False, "only true is supported, as in transformers")
        scale = attention.number("softmax_scale", None)
        for name in ("attn_uses_sequence_id", "prefix_lm"):
            if attention.flag(name):
                raise attention.unsupported(name, True, "only false is supported")
        attention.refuse_unread(ATTENTION_OFF)
    for name in ("init_device", "verbose", "resid_pdrop", "emb_pdrop", "learned_pos_emb", "init_config",
                 "tokenizer_name"):
        c.get(name)  # of training; with ALiBi there is no table of positions
    for name, values in OFF.items():
        if (value := c.get(name)) is not None and value not in values:
            raise c.unsupported(name, value, f"only {values[0]!r} is supported")
    return read_decoder(c, {**DEFAULTS, "ffn_times": times}, attention_scale=scale or 0.0,
                        alibi=AlibiConfig(max_bias))


def parts(c: ModelConfig, hf: str) -> Layer:
    """Name a layer's tensors."""
    fused = Source(hf + "attn.Wqkv.weight", (c.query_width + 2 * c.kv_width, c.hidden_size))
    return Layer(norm=hf + "norm_1", ffn_norm=hf + "norm_2", qkv=rows_of(fused, c), o=hf + "attn.out_proj.weight",
                 up=hf + "ffn.up_proj.weight", down=hf + "ffn.down_proj.weight", norm_bias=False)


forward = partial(gpt_like, parts=parts, positions="", layers="transformer.blocks.", norm="transformer.norm_f",
                  norm_bias=False)
FAMILY = Family(  # a file says 0 if the model has a table of positions instead of ALiBi
    (Gguf("mpt", fields=lambda m: {"alibi_bias_max": m.get("attention.max_alibi_bias")},
          fixed_fields={"hidden_act": "gelu"}, rotated="none"),),
    {"transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "norm_1": "attn_norm",
     "norm_2": "ffn_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "ffn.up_proj": "ffn_up",
     "ffn.down_proj": "ffn_down"},
    qkv="rows", prefix="transformer.")
