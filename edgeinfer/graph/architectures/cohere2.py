"""Command-R7B, Command A and Aya (Cohere): Command-R with windows; layers that see all have no rotation."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..families.family import Family, Gguf
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.common import read_sliding
from ..hf_config.reader import ConfigReader
from . import cohere
from .cohere import forward

__all__ = ["FAMILY", "forward", "read"]

EVERY = 4


def read(c: ConfigReader) -> ModelConfig:
    """Every `sliding_window_pattern`th layer sees all."""
    window = None if c.is_null("sliding_window") else c.integer("sliding_window", 4096)
    period = c.integer("sliding_window_pattern", c.integer("layer_switch", EVERY))
    layers, heads = c.integer("num_hidden_layers", high=2**12), c.integer("num_attention_heads", high=2**12)
    width = c.integer("hidden_size", high=2**17) // heads
    if c.integer("head_dim", width) != width:
        raise c.unsupported("head_dim", c.get("head_dim"), f"it is hidden_size / num_attention_heads, {width}")
    for name, value in (("order_of_interleaved_layers", "local_attn_first"), ("position_embedding_type", "rope_gptj")):
        c.choice(name, c.get(name, value), (value,))
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"):
        if not c.flag(name, True):
            raise c.unsupported(name, False, "only true is supported")
    if c.get("use_qk_norm"):
        raise c.unsupported("use_qk_norm", c.get("use_qk_norm"), "only false is supported")
    c.get("cache_implementation")  # about the storage of a cache, not its contents
    windows = read_sliding(c, window, lambda i: (i + 1) % period != 0)
    return cohere.read(c, 10000.0, windows=windows, ropes=tuple(int(bool(w)) for w in windows or (0,) * layers))


def _fields(m: GgufMetadata) -> dict[str, Any]:
    return {"logit_scale": m.get("logit_scale"), "sliding_window": m.get("attention.sliding_window"),
            "layer_types": m.layer_types(EVERY)}


FAMILY = Family((Gguf("cohere2", fields=_fields, tied=True),))
