"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a window in three layers of four, whose rotation is not stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig, RopeConfig
from ..families.family import NORMS_ON_THE_WAY_OUT, Family
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import LAYER_TYPES, read_decoder, read_sliding
from ..hf_config.reader import ConfigReader
from ..ops.rope import read_section
from . import olmo2
from .olmo2 import forward

__all__ = ["FAMILY", "forward", "read"]

THETA = 500000.0
DEFAULTS = {"max_position_embeddings": 2048, "eos_token_id": 50279, "rms_norm_eps": 1e-5, "rope_theta": THETA,
            "vocab_size": 50304}
EVERY = 4
FULL, SLIDING = LAYER_TYPES


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` is of all four projections of the attention, `rope_scaling` of layers that see all."""
    bias = c.flag("attention_bias")
    window = None if c.is_null("sliding_window") else c.integer("sliding_window", 4096)
    windows = read_sliding(c, window, lambda i: (i + 1) % EVERY != 0)
    c, local = _rotations(c)
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, windows=windows,
                        local_rope=local if any(windows) else None, ropes=tuple(2 if w else 1 for w in windows))


def _rotations(c: ConfigReader) -> tuple[ConfigReader, RopeConfig]:
    """The config with the rotation of layers that see all in its section of RoPE, and the rotation of the others."""
    both, scaling = c.section("rope_parameters"), c.section("rope_scaling")
    local, full = RopeConfig(THETA), dict[str, Any]()
    if both:
        if not both.has(FULL) and not both.has(SLIDING):
            raise c.unsupported("rope_parameters", both.items(), f"it has a section for {FULL} and one for {SLIDING}")
        inner, own = both.section(SLIDING), both.section(FULL)
        both.refuse_unread()
        full = own.items() if own else {}
        if inner and (local := read_section(inner, THETA, None, c.integer("max_position_embeddings", 2048))
                      ).kind != "default":
            raise c.unsupported("rope_type of layers with a window", local.kind, "it must be default")
    full |= scaling.items() if scaling else {}
    return c.instead(rope_parameters=full or None, rope_scaling=None), local


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Layers with a window turn by the plain rotation."""
    own = m.get("rope.freq_base_swa") or m.get("rope.freq_base") or 10000.0
    return {"sliding_window": m.get("attention.sliding_window"), "layer_types": m.layer_types(EVERY),
            "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": own}}}


FAMILY = Family((replace(olmo2.GGUF, when=lambda m: bool(m.get("attention.sliding_window")), fields=_fields),),
                NORMS_ON_THE_WAY_OUT)
