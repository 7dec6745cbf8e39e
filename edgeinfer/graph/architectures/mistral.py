"""Mistral (arXiv 2310.06825): Llama whose queries may see a sliding window of the context."""

from __future__ import annotations

from ..common import read_decoder
from ..config import ModelConfig
from ..reader import ConfigReader
from .llama import forward

__all__ = ["forward", "read"]

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2}


def read(c: ConfigReader) -> ModelConfig:
    """One window for all layers; a null `sliding_window` means none, an absent one 4096."""
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096)
    layers = c.integer("num_hidden_layers", high=2**12)
    return read_decoder(c, DEFAULTS, windows=(window,) * layers if window else ())
