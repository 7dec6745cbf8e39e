"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts in each layer, or in some."""

from __future__ import annotations

from functools import partial

from ..builder.blocks import llama_like
from ..builder.moe import moe
from ..config import ModelConfig
from ..families.family import Family, Gguf, GgufExperts, Ollama, Seeing
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import attend
from .qwen2 import SECTIONS
from .qwen2_moe import qwen_experts
from .qwen3 import SEEING

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4}


def read(c: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections of the attention; a window is that of all layers."""
    bias, layers = c.flag("attention_bias"), c.integer("num_hidden_layers", high=2**12)
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096)
    windows = (window,) * layers if window and c.flag("use_sliding_window") else ()
    c.get("max_window_layers")  # which no layer of this family looks at
    return read_decoder(c, DEFAULTS, attention_bias=bias, attention_output_bias=bias, windows=windows,
                        experts=qwen_experts(c, 128, 8, 768))


forward = partial(llama_like, block=lambda g, c, x, i: moe(g, c, attend(g, c, x, i, qk_norm=True), i))
EXPERTS = GgufExperts(size="moe_intermediate_size", normalise=True)
FAMILY = Family((Gguf("qwen3moe", experts=EXPERTS),
                 Gguf("qwen3vlmoe", experts=EXPERTS, ignored=SEEING, ollama=Ollama(keys=SECTIONS))),
                seeing=(Seeing("qwen3_vl_moe", "qwen3_vl_moe_text", meant={"norm_topk_prob": True},
                               unsaid={"rope_theta": 500000.0}),))
