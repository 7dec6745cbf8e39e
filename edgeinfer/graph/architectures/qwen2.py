"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with a bias on queries, keys and values."""

from __future__ import annotations

from ..config import ModelConfig
from ..families.family import Family, Gguf, Ollama, Seeing
from ..hf_config.common import read_decoder, read_layer_windows
from ..hf_config.reader import ConfigReader
from .llama import forward

__all__ = ["FAMILY", "forward", "read"]

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def read(c: ConfigReader) -> ModelConfig:
    """The bias is always there: a config that says otherwise describes another model."""
    if not c.flag("attention_bias", True):
        raise c.unsupported("attention_bias", False, "Qwen2's attention has a bias; remove the field from the file")
    return read_decoder(c, DEFAULTS, attention_bias=True, windows=read_layer_windows(c))


SECTIONS = {"rope.mrope_section": "rope.dimension_sections", "mrope_sections": "rope.dimension_sections"}
"""ollama's keys of the shares of a rotation for time, height and width of a picture; of text all three are the same."""

FAMILY = Family((
    Gguf("qwen2"), Gguf("qwen2vl", ignored=("rope.dimension_sections",), ollama=Ollama("qwen25vl", SECTIONS))),
    seeing=(Seeing("qwen2_vl", "qwen2_vl_text"), Seeing("qwen2_5_vl", "qwen2_5_vl_text")))
