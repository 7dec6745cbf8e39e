"""SmallThinker (PowerInfer, arXiv 2507.20984): experts that rectify, chosen before a layer's attention.

The router sees the layer's input, so a token's experts can be read from storage while its attention is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import CheckpointError
from ..builder.builder import GraphBuilder
from ..builder.moe import count_experts, moe
from ..config import ExpertsConfig, ModelConfig
from ..families.family import SOFTMAX, ExpertModules, Family, Gguf, GgufExperts
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from .llama import attend

DEFAULTS = {"vocab_size": 151936, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
            "rope_theta": 1e6, "tie_word_embeddings": True, "bos_token_id": 151643}


def read(c: ConfigReader) -> ModelConfig:
    """Windows and rotations by layer; weights of a token's experts add up to 1, whatever `norm_topk_prob` says.

    The config of 21B-A3B speaks of routers in other places and of a second kind of experts, which no model has.
    """
    c.own_code()
    for name in ("norm_topk_prob", "model_name"):
        c.get(name)
    if not c.flag("moe_enable_early_router", True):
        raise c.unsupported("moe_enable_early_router", False, "only routers before the attention are supported")
    n, active = count_experts(c, "moe_num_primary_experts", 32, 4, "moe_num_active_primary_experts")
    size = c.integer("moe_ffn_hidden_size", 768, high=2**20)
    scores = "softmax" if c.flag("moe_primary_router_apply_softmax") else "sigmoid"
    turns, slides = _layout(c, "rope_layout", 1), _layout(c, "sliding_window_layout", 0)
    window = c.integer("sliding_window_size", 4096)
    windows = tuple(window if s else 0 for s in slides) if any(slides) else ()
    config = read_decoder(c.instead(intermediate_size=size), DEFAULTS, windows=windows,
                          ropes=() if all(turns) else turns, experts=ExpertsConfig(n, active, size, scores=scores))
    return replace(config, hidden_act="relu")


def _layout(c: ConfigReader, name: str, default: int) -> tuple[int, ...]:
    """0 or 1 for each layer."""
    layers, given = c.integer("num_hidden_layers", high=2**12), c.get(name)
    given = [default] * layers if given is None else given
    if not isinstance(given, list) or len(given) != layers or any(type(g) is not int or g not in (0, 1) for g in given):
        raise CheckpointError(f"{c.where}: {name} is {given!r:.60}; it must list 0 or 1 for each of {layers} layers.")
    return tuple(given)


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        g.layer = i
        routes = g.route(x, f"layers.{i}.", f"model.layers.{i}.mlp.")
        x = moe(g, c, attend(g, c, x, i), i, routes)
    return g.build(g.logits(x, "model.norm.weight", "lm_head.weight"))


EVERY = 4


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Return the fields of layers: with windows, the first of every four layers has neither a window nor a rotation."""
    layers, window = m.layers(), m.get("attention.sliding_window")
    local = [int(not window or i % EVERY != 0) for i in range(layers)]
    experts = {"moe_ffn_hidden_size": m.get("feed_forward_length"),
               "moe_primary_router_apply_softmax": m.get("expert_gating_func") == SOFTMAX}
    return {"sliding_window_size": window or None, "rope_layout": local,
            "sliding_window_layout": local if window else None, **(experts if m.get("expert_count") else {})}


FAMILY = Family(
    (Gguf("smallthinker", fields=_fields, experts=GgufExperts(
        "moe_num_primary_experts", "moe_num_active_primary_experts", "moe_ffn_hidden_size",
        scores={SOFTMAX: "softmax", 2: "sigmoid"})),),
    experts=ExpertModules("block_sparse_moe", ("gate", "up", "down"), "block_sparse_moe.primary_router"))
