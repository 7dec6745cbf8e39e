"""Granite 4 (IBM): Granite's multipliers around Mamba 2 (arXiv 2405.21060) and attention, with or without experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..builder.hybrid import mamba, read_kinds, read_scan, scan_layer
from ..builder.moe import moe, read_experts
from ..config import ModelConfig
from ..families.family import Family, Gguf, GgufExperts
from ..families.gguf_hybrid import FULL, LINEAR, TENSORS_OF_SCAN, kv_heads, scan_fields
from ..families.gguf_metadata import GgufMetadata
from ..hf_config.reader import ConfigReader
from ..recurrent import SCAN
from ..tensors import Tensor
from . import granite, granitemoe
from .llama import attend

DEFAULTS = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
KINDS = {"linear_attention": SCAN, "mamba": SCAN, "full_attention": "attention", "attention": "attention"}
ROTATIONS = ("rope", "nope")


def read(c: ConfigReader) -> ModelConfig:
    """Layers scan, or attend where `layer_types` says so; heads turn if `position_embedding_type` is rope."""
    c.called(layer_types="layers_block_type" if not c.has("layer_types") else "layer_types")
    kinds = read_kinds(c, KINDS, ["linear_attention"] * c.integer("num_hidden_layers", high=2**12))
    width = c.integer("mamba_expand", 2, high=64) * c.integer("hidden_size", high=2**17)
    bias, eps = c.flag("mamba_proj_bias"), c.number("rms_norm_eps", 1e-6, high=1.0)
    c.choice("hidden_act", c.get("hidden_act") or "silu", ("silu", "swish"))  # which is that of convolutions, too
    scan = read_scan(c, tuple(i for i, kind in enumerate(kinds) if kind == SCAN), DEFAULTS, width, in_bias=bias,
                     out_bias=bias, norm_eps=eps)
    c.choice("normalization_function", c.get("normalization_function") or "rmsnorm", ("rmsnorm",))
    c.get("init_method")
    turns = c.choice("position_embedding_type", c.get("position_embedding_type") or "nope", ROTATIONS) == "rope"
    shared = c.integer("shared_intermediate_size", 1024, high=2**20)
    experts = None
    if c.integer("num_local_experts", 8, low=0):
        size = c.integer("intermediate_size", 11008, high=2**20)
        experts = read_experts(c, "num_local_experts", 8, 2, size, shared_size=shared)
    c.get("num_experts_per_tok")  # of a model without experts
    c.get("intermediate_size")
    model = granite.read(c.instead(intermediate_size=shared))
    return replace(model, recurrent=scan, rotary_dim=model.rotary_dim if turns else 0,
                   experts=replace(experts, shared_gate=False) if experts else None)


def mix(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """The first half of a block: x + the scan, or the attention, of norm(x)."""
    g.layer, name, hf = i, f"layers.{i}.", f"model.layers.{i}."
    if not c.recurrent or i not in c.recurrent.layers:
        return attend(g, c, x, i)
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    return scan_layer(g, c, h, x, name, mamba(c, hf + "mamba."))


SHARED = ("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight")
def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Layers without key-value heads scan; no head turns in a file that has such layers."""
    heads, n = kv_heads(m)
    if m.get("rope.scaling.finetuned"):
        raise m.unsupported("rope.scaling.finetuned", True, "only Granite 4 is read of such files, whose heads do not "
                            "turn")
    experts, shared = m.get("expert_count") or 0, m.get("expert_shared_feed_forward_length")
    width = m.get("ssm.inner_size") or 0
    return {**granite.gguf_fields(m), **scan_fields(m), "num_key_value_heads": n, "num_local_experts": experts,
            "layer_types": [FULL if each else LINEAR for each in heads],
            "mamba_expand": max(width // m.size("hidden_size"), 1),
            "shared_intermediate_size": shared or m.size("intermediate_size")}


forward = partial(llama_like, block=lambda g, c, x, i: moe(g, c, mix(g, c, x, i), i))
TENSORS = {f"mamba.{name}": own for name, own in TENSORS_OF_SCAN.items()}
FAMILY = Family((Gguf("granitehybrid", fields=_fields, experts=GgufExperts("num_local_experts"),
                      ignored=("rope.dimension_count",)),), TENSORS, neighbours=True,
                experts=replace(granitemoe.EXPERTS, shared=SHARED, plain=True))
