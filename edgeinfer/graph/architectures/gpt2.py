"""GPT-2: layer norms, learned positions, an FFN without a gate, and matrices stored as (in_features, out_features)."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import GPT_NAMES, Layer, gpt_like, rows_of
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..weights import Source

DEFAULTS = {"max_position_embeddings": 1024, "bos_token_id": 50256, "eos_token_id": 50256, "rotary": False,
            "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "ffn_times": 4, "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """Sizes by GPT-2's own names; scores are always divided by the square root of a head's size."""
    c.called(**GPT_NAMES)
    c.get("n_ctx")  # an older name beside n_positions
    if not c.flag("scale_attn_weights", True):
        raise c.unsupported("scale_attn_weights", False, "only true is supported")
    return read_decoder(c, DEFAULTS, attention_bias=True, attention_output_bias=True, mlp_bias=True)


def parts(c: ModelConfig, hf: str) -> Layer:
    """A layer's tensors."""
    d, n, fused = c.hidden_size, c.intermediate_size, c.query_width + 2 * c.kv_width

    def conv(name: str, width: int, out: int) -> Source:
        return Source(f"{hf}{name}.weight", (width, out)).transposed()

    return Layer(
        norm=hf + "ln_1", ffn_norm=hf + "ln_2", qkv=rows_of(conv("attn.c_attn", d, fused), c),
        qkv_bias=rows_of(Source(hf + "attn.c_attn.bias", (fused,)), c), o=conv("attn.c_proj", c.query_width, d),
        o_bias=(hf + "attn.c_proj.bias",), up=conv("mlp.c_fc", d, n), down=conv("mlp.c_proj", n, d),
        ffn_bias=(hf + "mlp.c_fc.bias", hf + "mlp.c_proj.bias"))


forward = partial(gpt_like, parts=parts)
TENSORS = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
           "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
           "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
FAMILY = Family(
    (Gguf("gpt2", fixed_fields={"hidden_act": "gelu_new"}, ignored=("tensor_data_layout",), rotated="none"),), TENSORS,
    qkv="rows", prefix="transformer.",
    ambiguous="a quantised GPT-2, whose matrices programs have packed by rows or by columns, and the files do not say "
              "which")
