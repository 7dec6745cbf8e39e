"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): attention and FFN side by side, a quarter of each head turns."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import Layer, gpt_like, heads_of
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 2, "rms_norm_eps": 1e-5,
            "hidden_act": "gelu", "partial": (("rotary_pct", "partial_rotary_factor"), 0.25)}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` is of all four projections of the attention."""
    c.called(rms_norm_eps="layer_norm_eps", rope_theta="rotary_emb_base")
    bias, side = c.flag("attention_bias", True), c.flag("use_parallel_residual", True)
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=True,
                        parallel_residual=side, parallel_norms=2 if side else 1)


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors; the rows of q, k and v alternate by head."""
    attn, mlp, rows = hf + "attention.", hf + "mlp.", c.query_width + 2 * c.kv_width
    fused = Source(attn + "query_key_value.weight", (rows, c.hidden_size))
    bias = Source(attn + "query_key_value.bias", (rows,))
    return Layer(
        norm=hf + "input_layernorm", ffn_norm=hf + "post_attention_layernorm", qkv=heads_of(fused, c),
        qkv_bias=heads_of(bias, c) if c.attention_bias else (), o=attn + "dense.weight",
        o_bias=(attn + "dense.bias",) if c.attention_output_bias else (), up=mlp + "dense_h_to_4h.weight",
        down=mlp + "dense_4h_to_h.weight", ffn_bias=(mlp + "dense_h_to_4h.bias", mlp + "dense_4h_to_h.bias"))


forward = partial(gpt_like, parts=parts, embed="gpt_neox.embed_in", positions="", layers="gpt_neox.layers.",
                  norm="gpt_neox.final_layer_norm", head="embed_out")
FAMILY = Family(
    (Gguf("gptneox", fields=lambda m: {"use_parallel_residual": bool(m.get("use_parallel_residual"))},
          fixed_fields={"hidden_act": "gelu"}, rotated="share"),),
    {"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
     "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up",
     "mlp.dense_4h_to_h": "ffn_down"},
    qkv="rows", prefix="gpt_neox.", aliases={"embed_out.weight": "lm_head.weight"})  # as transformers 5 writes it
