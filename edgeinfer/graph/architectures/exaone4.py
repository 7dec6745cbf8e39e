"""EXAONE 4 (arXiv 2507.11407): norms on the way out as OLMo 2's, normed heads, layers that see all without rotation."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..builder.blocks import llama_like
from ..config import ModelConfig
from ..families.family import NORMS_ON_THE_WAY_OUT, Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_decoder, read_sliding
from ..hf_config.reader import ConfigReader
from .olmo2 import layer

DEFAULTS = {"max_position_embeddings": 2048, "num_key_value_heads": 32, "bos_token_id": 0, "eos_token_id": 2,
            "rms_norm_eps": 1e-5, "vocab_size": 102400, "num_attention_heads": 32}


def read(c: ConfigReader) -> ModelConfig:
    """Without `sliding_window` all layers see all and turn; with one those turn that have it.

    `sliding_window_pattern` is the length of a period, whose last layer sees all, or its letters, such as LLLG.
    """
    layers = c.integer("num_hidden_layers", high=2**12)
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096)
    pattern = c.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        period = c.integer("sliding_window_pattern", 4, low=0) if window else 0
        pattern = "L" * (period - 1) + "G" if period else "G"
    if set(pattern) - set("LG") or not pattern:
        raise c.unsupported("sliding_window_pattern", pattern, "it must be a number or consist of L and G")
    windows = read_sliding(c, window, lambda i: window is not None and pattern[i % len(pattern)] == "L")
    ropes = tuple(int(bool(w)) for w in windows or (0,) * layers) if window else ()
    return read_decoder(c, DEFAULTS, windows=windows, ropes=ropes)


EVERY, LAYERS_OF_32B = 4, 64


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Files of the 32B model do not all say its windows; llama.cpp knows them by its 64 layers."""
    large = m.layers() == LAYERS_OF_32B
    window = m.get("attention.sliding_window") or (4096 if large else None)
    return {"sliding_window": window, **({"layer_types": m.layer_types(EVERY)} if window else {})}


forward = partial(llama_like, block=layer, head_norms=True)
FAMILY = Family((Gguf("exaone4", fields=_fields, ignored=("attention.sliding_window_pattern",)),), NORMS_ON_THE_WAY_OUT)
