"""Where a GGUF file has the tensors that an architecture calls by Hugging Face's names."""

from __future__ import annotations

import re
from dataclasses import replace

from edgeinfer.graph import Graph, ModelConfig, Source, Weight

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
_NAME = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)|(.+)\.(weight|bias)")
INTERLEAVED = ("llama", "mistral")
"""Architectures whose q and k rows llama.cpp's converter reorders, for a rotation that turns neighbours."""


def with_gguf_names(graph: Graph, config: ModelConfig) -> Graph:
    """Return the graph with the sources of its weights as a GGUF file has them."""
    return replace(graph, weights=tuple(_renamed(weight, config) for weight in graph.weights))


def _renamed(weight: Weight, config: ModelConfig) -> Weight:
    return replace(weight, sources=tuple(_source(source, config) for source in weight.sources))


def _source(source: Source, config: ModelConfig) -> Source:
    """The same elements by the file's name; steps of the architecture come behind those that undo the converter's."""
    name = gguf_name(source.name)
    plain = Source(name, source.stored, source.index, shared=source.shared)
    if config.model_type in INTERLEAVED and re.search(r"\.attn_[qk]\.", name):
        plain = plain.rope_halves(config.head_dim)
    return replace(plain, steps=(*plain.steps, *source.steps))


def gguf_name(name: str) -> str:
    """The file's name of a tensor; one that has none there keeps its own, and will be said to be missing."""
    match = _NAME.fullmatch(name)
    if match and match[1] and match[2] in _LAYER:
        return f"blk.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return f"{_OUTER[match[4]]}.{match[5]}" if match and match[4] in _OUTER else name
