"""GPT-Neo: GPT-2 whose every second layer has a window, and whose scores are not divided by anything."""

from __future__ import annotations

from functools import partial
from itertools import islice

from ...errors import CheckpointError
from ..builder.blocks import Layer, gpt_like
from ..config import ModelConfig
from ..families.family import Family
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader

DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 50256, "eos_token_id": 50256, "rotary": False,
            "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "ffn_times": 4, "tie_word_embeddings": True}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_types` lists pairs of kinds and how often they come one after the other."""
    c.called(num_hidden_layers="num_layers", num_attention_heads="num_heads", hidden_act="activation_function",
             rms_norm_eps="layer_norm_epsilon")
    layers, window = c.integer("num_hidden_layers", high=2**12), c.integer("window_size", 256)
    given = c.get("attention_types", [[["global", "local"], 12]])
    c.get("attention_layers")  # the same, one by one
    try:
        every = (kind for names, times in given for _ in range(min(times, layers)) for kind in names)
        kinds = list(islice(every, layers + 1))
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        raise CheckpointError(f"{c.where}: attention_types is {given!r:.60}; it must say global or local for {layers} "
                              "layers.")
    windows = tuple(window if kind == "local" else 0 for kind in kinds)
    return read_decoder(c, DEFAULTS, attention_output_bias=True, mlp_bias=True, attention_scale=1.0,
                        windows=windows if any(windows) else ())


def parts(c: ModelConfig, hf: str) -> Layer:
    """Name a layer's tensors."""
    attn, mlp = hf + "attn.attention.", hf + "mlp."
    return Layer(
        norm=hf + "ln_1", ffn_norm=hf + "ln_2", o=attn + "out_proj.weight", o_bias=(attn + "out_proj.bias",),
        qkv=tuple(attn + p + "_proj.weight" for p in "qkv"), up=mlp + "c_fc.weight", down=mlp + "c_proj.weight",
        ffn_bias=(mlp + "c_fc.bias", mlp + "c_proj.bias"))


forward = partial(gpt_like, parts=parts)
FAMILY = Family(prefix="transformer.")
