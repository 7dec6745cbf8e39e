"""BLOOM (arXiv 2211.05100): ALiBi, layer norms, also of the embedding, and heads of q, k and v in one tensor."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import Layer, gpt_like, heads_of
from ..config import AlibiConfig, ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "rotary": False,
            "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "ffn_times": 4, "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """Read sizes by BLOOM's own names; positions are not limited, and `seq_length` says those of the training."""
    c.called(rms_norm_eps="layer_norm_epsilon", max_position_embeddings="seq_length",
             hidden_size="n_embed" if c.has("n_embed") else "hidden_size",
             num_hidden_layers="n_layer" if c.has("n_layer") else "num_hidden_layers",
             num_attention_heads="n_head" if c.has("n_head") else "num_attention_heads")
    for name in ("slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion",
                 "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id"):
        c.get(name)  # about how the training ran, not about the model
    return read_decoder(c, DEFAULTS, attention_bias=True, attention_output_bias=True, mlp_bias=True,
                        alibi=AlibiConfig())


def parts(c: ModelConfig, hf: str) -> Layer:
    """Name a layer's tensors."""
    attn, mlp, rows = hf + "self_attention.", hf + "mlp.", c.query_width + 2 * c.kv_width
    return Layer(
        norm=hf + "input_layernorm", ffn_norm=hf + "post_attention_layernorm",
        qkv=heads_of(Source(attn + "query_key_value.weight", (rows, c.hidden_size)), c),
        qkv_bias=heads_of(Source(attn + "query_key_value.bias", (rows,)), c), o=attn + "dense.weight",
        o_bias=(attn + "dense.bias",), up=mlp + "dense_h_to_4h.weight", down=mlp + "dense_4h_to_h.weight",
        ffn_bias=(mlp + "dense_h_to_4h.bias", mlp + "dense_4h_to_h.bias"))


forward = partial(gpt_like, parts=parts, embed="transformer.word_embeddings", positions="",
                  embed_norm="transformer.word_embeddings_layernorm")
FAMILY = Family(
    (Gguf("bloom", fixed_fields={"hidden_act": "gelu_new"}, rotated="none"),),
    {"transformer.word_embeddings": "token_embd", "transformer.word_embeddings_layernorm": "token_embd_norm",
     "transformer.ln_f": "output_norm", "self_attention.query_key_value": "attn_qkv",
     "self_attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"},
    qkv="rows", prefix="transformer.")
