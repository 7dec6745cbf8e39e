"""SmolLM3: Llama without rotation in every fourth layer (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from ...errors import CheckpointError
from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..hf_config.common import read_decoder, read_sliding
from ..hf_config.reader import ConfigReader
from .llama import forward

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "bos_token_id": 128000,
            "eos_token_id": 128001, "tie_word_embeddings": True, "rope_theta": 2e6}


def read(c: ConfigReader) -> ModelConfig:
    """Read the config: despite its name, `no_rope_layers` has a 1 for each layer with a rotation."""
    layers, bias = c.integer("num_hidden_layers", high=2**12), c.flag("attention_bias")
    every, given = c.integer("no_rope_layer_interval", 4), c.get("no_rope_layers")
    if given is None:
        given = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(type(g) is not int or g not in (0, 1) for g in given):
        raise CheckpointError(f"{c.where}: no_rope_layers is {given!r:.60}; it must list 0 or 1 for {layers} layers.")
    window = c.integer("sliding_window", None)
    window = window if c.flag("use_sliding_window") else None
    windows = read_sliding(c, window, lambda i: bool(window and not given[i]))
    c.get("max_window_layers")  # the layers are listed
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, mlp_bias=c.flag("mlp_bias"),
                        windows=windows, ropes=() if all(given[:layers]) else tuple(given[:layers]))


FAMILY = Family((Gguf("smollm3", fixed_fields={"no_rope_layer_interval": 4}),), neighbours=True)
