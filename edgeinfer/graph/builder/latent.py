"""Multi-head latent attention as a half of a block, and its fields of configs (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ..config import ExpertsConfig, LatentConfig, ModelConfig
from ..graph import Graph
from ..hf_config.common import read_decoder
from ..hf_config.reader import ConfigReader
from ..ops.rope import stretch_factor
from ..tensors import Tensor
from ..weights import Source
from .blocks import llama_like
from .builder import GraphBuilder
from .moe import count_experts, moe, with_dense_layers

NORM_EPS = 1e-6
"""Epsilon of the latents' norms, independent of the config's value for the others."""


# -- configs -----------------------------------------------------------------------------------------------------------


def read_latent(c: ConfigReader, defaults: dict[str, Any], experts: ExpertsConfig | None) -> ModelConfig:
    """A model with latent attention; `defaults` are as those of `read_decoder`, with the family's sizes beside them."""
    sizes = {name: c.integer(name, defaults.get(name), high=2**16)
             for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    rank, nope, rotary, value = sizes.values()
    q_rank = c.integer("q_lora_rank", None if c.is_null("q_lora_rank") else defaults["q_lora_rank"], high=2**16)
    for name in ("kv_lora_rank", "v_head_dim"):
        if sizes[name] % 16:
            raise c.unsupported(name, sizes[name], "it must be a multiple of 16")
    if rotary % 2 or nope % 2:
        raise UnsupportedModelError(f"{c.where}: qk_nope_head_dim is {nope} and qk_rope_head_dim {rotary}; both must "
                                    "be even.")
    heads = c.integer("num_attention_heads", defaults["num_attention_heads"], high=2**12)
    if (n := c.integer("num_key_value_heads", heads)) != heads:
        raise c.unsupported("num_key_value_heads", n, f"with latent attention it is num_attention_heads, {heads}")
    for name, own in (("head_dim", rotary), ("qk_head_dim", nope + rotary)):
        if c.integer(name, own) != own:
            raise c.unsupported(name, c.get(name), f"with these heads it is {own}")
    bias = c.flag("attention_bias")
    scale = (nope + rotary) ** -0.5 * _stretched(c) ** 2
    plain = c.instead(head_dim=rotary, num_key_value_heads=1)
    model = read_decoder(plain, defaults, attention_bias=bias, attention_output_bias=bias, experts=experts,
                         attention_scale=scale)
    latent = LatentConfig(q_rank or 0, nope, value, c.flag("rope_interleave", True))
    return replace(model, head_dim=rank + rotary, rotary_dim=rotary, latent=latent)


def _stretched(c: ConfigReader) -> float:
    """Return YaRN's factor of queries and of keys, in addition to the tables' own factor."""
    for section in map(c.section, ("rope_scaling", "rope_parameters")):
        if section is not None and (section.get("rope_type") or section.get("type") or "default") != "default":
            every = section.number("mscale_all_dim", 0.0, above=-1.0)
            if every:
                return stretch_factor(section.number("factor"), every)
    return 1.0


def read_routed(c: ConfigReader, defaults: dict[str, Any], dense: tuple[int, ...], **own: Any
                ) -> ExpertsConfig | None:
    """The MoE model of DeepSeek and GLM: experts in groups, and shared ones that are one FFN of their sizes together.

    None if every layer has a plain FFN.
    """
    total, active = count_experts(c, "n_routed_experts", defaults["n_routed_experts"],
                                  defaults["num_experts_per_tok"])
    size = c.integer("moe_intermediate_size", defaults["moe_intermediate_size"], high=2**20)
    shared = c.integer("n_shared_experts", None if c.is_null("n_shared_experts") else defaults["n_shared_experts"],
                       low=0, high=2**10) or 0
    if not shared:
        raise c.unsupported("n_shared_experts", c.get("n_shared_experts"), "published models have at least one")
    groups = c.integer("n_group", defaults.get("n_group", 1), high=total)
    best = c.integer("topk_group", defaults.get("topk_group", 1), high=groups)
    if total % groups:
        raise CheckpointError(f"{c.where}: n_group is {groups}, of which {total} experts are not a multiple.")
    scale = c.number("routed_scaling_factor", defaults["routed_scaling_factor"])
    own = {"groups": groups, "active_groups": best, **own}
    experts = ExpertsConfig(total, active, size, scale=scale, shared_size=size * shared, shared_gate=False, **own)
    return with_dense_layers(experts, dense, c.integer("num_hidden_layers", high=2**12))


# -- graph -------------------------------------------------------------------------------------------------------------


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    return llama_like(g, c, block)


def block(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """One layer."""
    return moe(g, c, attend(g, c, x, i), i)


def attend(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """The first half of a block: x + attention(norm(x)), with one latent KV head for all queries."""
    latent, heads = c.latent, c.num_attention_heads
    assert latent
    g.layer, name, attn = i, f"layers.{i}.", f"model.layers.{i}.self_attn."
    rank, nope, value = c.head_dim - c.rope_dim, latent.nope_dim, latent.value_dim
    q_rows, kv_rows, first = _queries_and_latents(g, c, x, i)
    step = nope + value
    up = Source(attn + "kv_b_proj.weight", (heads * step, rank))
    to_latent = tuple(up.rows(n * step, n * step + nope).transposed() for n in range(heads))
    absorbed = g.head_linear(q_rows, name + "k_b", to_latent, (rank, nope), heads, c.head_dim, c.head_dim)
    stored = g.store_latent(absorbed, q_rows, kv_rows, attn + "kv_a_layernorm.weight", heads * nope, first, NORM_EPS)
    h = g.head_linear(g.latent_attention(stored), name + "v_b", (up.every(step, nope, value),), (value, rank), heads,
                      value)
    return g.linear(h, name + "o", (attn + "o_proj.weight",), (c.hidden_size,), residual=x,
                    bias=(attn + "o_proj.bias",) if c.attention_output_bias else ())


def _queries_and_latents(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> tuple[Tensor, Tensor, int]:
    """Rows that have the queries of all heads, first the unrotated part; rows with latent and key, and their column.

    Where queries come from the stream, as latents do, both are columns of one matmul.
    """
    latent, heads, rotary = c.latent, c.num_attention_heads, c.rope_dim
    assert latent
    name, attn, norm = f"layers.{i}.", f"model.layers.{i}.self_attn.", f"model.layers.{i}.input_layernorm.weight"
    rank, nope = c.head_dim - rotary, latent.nope_dim
    widths, key_widths, own = (heads * nope, heads * rotary), (rank, rotary), nope + rotary

    def halves(source: Source) -> Source:
        return source.rope_halves(rotary) if latent.interleaved else source

    module = attn + ("q_b_proj" if latent.q_rank else "q_proj")
    q = Source(module + ".weight", (heads * own, latent.q_rank or c.hidden_size))
    queries = q.every(own, 0, nope), halves(q.every(own, nope, rotary))
    module = attn + "kv_a_proj_with_mqa"
    down, shift = Source(module + ".weight", (c.head_dim, c.hidden_size)), Source(module + ".bias", (c.head_dim,))
    keys, biases = ((part.rows(0, rank), halves(part.rows(rank, c.head_dim))) for part in (down, shift))
    if not latent.q_rank and not c.attention_bias:
        h = g.rms_norm(x, name + "attention_norm", norm)
        both = g.linear(h, name + "q_kv", (*queries, *keys), (*widths, *key_widths))
        return both, both, sum(widths)
    h = g.rms_norm(x, name + "attention_norm", norm)
    kv_rows = g.linear(h, name + "kv_a", keys, key_widths, bias=biases if c.attention_bias else ())
    if latent.q_rank:
        h = g.linear(h, name + "q_a", (attn + "q_a_proj.weight",), (latent.q_rank,),
                     bias=(attn + "q_a_proj.bias",) if c.attention_bias else ())
        h = g.rms_norm(h, name + "q_a_norm", attn + "q_a_layernorm.weight", eps=NORM_EPS)
    return g.linear(h, name + "q", queries, widths), kv_rows, 0
