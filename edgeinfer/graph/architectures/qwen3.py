"""Qwen3 (arXiv 2505.09388): Llama's layer with an RMS norm on each head of queries and keys, and its own head_dim."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like
from ..config import ModelConfig
from ..families.family import Family, Gguf, Ollama, Seeing
from ..hf_config.common import read_decoder, read_layer_windows
from ..hf_config.reader import ConfigReader
from .llama import layer
from .qwen2 import SECTIONS

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections of the attention."""
    bias = c.flag("attention_bias")
    windows = read_layer_windows(c)
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, windows=windows)


SEEING = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys that say how pictures come in."""
forward = partial(llama_like, block=layer, qk_norm=True)
FAMILY = Family((Gguf("qwen3"), Gguf("qwen3vl", ignored=SEEING, ollama=Ollama(keys=SECTIONS))),
                seeing=(Seeing("qwen3_vl", "qwen3_vl_text", unsaid={"rope_theta": 500000.0}),))
