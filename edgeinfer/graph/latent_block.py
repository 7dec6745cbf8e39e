"""Multi-head latent attention as a half of a block, and what configs say of it (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .builder import GraphBuilder
from .common import read_decoder
from .config import ExpertsConfig, LatentConfig, ModelConfig
from .graph import Graph
from .mixture import count_experts, mixture
from .reader import ConfigReader
from .rope import stretch_factor
from .types import Tensor
from .weights import Source

NORM_EPS = 1e-6
"""Of the norms of the latents, whatever the config says of the others."""


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
    """What YaRN multiplies queries and keys by, each, beside the tables' own factor."""
    for section in map(c.section, ("rope_scaling", "rope_parameters")):
        if section is not None and (section.get("rope_type") or section.get("type") or "default") != "default":
            every = section.number("mscale_all_dim", 0.0, above=-1.0)
            if every:
                return stretch_factor(section.number("factor"), every)
    return 1.0


def read_routed(c: ConfigReader, defaults: dict[str, Any], dense: tuple[int, ...], **own: Any) -> ExpertsConfig:
    """The mixture of DeepSeek and GLM: experts in groups, and shared ones that are one FFN of their sizes together."""
    total, active = count_experts(c, "n_routed_experts", defaults["n_routed_experts"],
                                  defaults["num_experts_per_tok"])
    size = c.integer("moe_intermediate_size", defaults["moe_intermediate_size"], high=2**20)
    shared = c.integer("n_shared_experts", None if c.is_null("n_shared_experts") else defaults["n_shared_experts"],
                       low=0, high=2**10) or 0
    if not shared:
        raise c.unsupported("n_shared_experts", c.get("n_shared_experts"), "published models have at least one")
    groups = c.integer("n_group", 1, high=total)
    best = c.integer("topk_group", 1, high=groups)
    if total % groups:
        raise CheckpointError(f"{c.where}: n_group is {groups}, of which {total} experts are no multiple.")
    scale = c.number("routed_scaling_factor", defaults["routed_scaling_factor"])
    own = {"groups": groups, "active_groups": best, **own}
    return ExpertsConfig(total, active, size, scale=scale, shared_size=size * shared, shared_gate=False,
                         dense_layers=dense, **own)


# -- graph -------------------------------------------------------------------------------------------------------------


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        x = mixture(g, c, attend(g, c, x, i), i)
    return g.build(g.logits(x, "model.norm.weight", "lm_head.weight"))


def attend(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int) -> Tensor:
    """The first half of a block: x + attention(norm(x)), with one latent KV head for all queries."""
    latent, heads = c.latent, c.num_attention_heads
    assert latent
    g.layer, name, attn = i, f"layers.{i}.", f"model.layers.{i}.self_attn."
    rotary, nope = c.rope_dim, latent.nope_dim
    rank, own = c.head_dim - rotary, nope + rotary

    q = Source(attn + ("q_b_proj" if latent.q_rank else "q_proj") + ".weight",
               (heads * own, latent.q_rank or c.hidden_size))
    queries = q.every(own, 0, nope), _halves(q.every(own, nope, rotary), latent.interleaved, rotary)
    down = Source(attn + "kv_a_proj_with_mqa.weight", (c.head_dim, c.hidden_size))
    keys = down.rows(0, rank), _halves(down.rows(rank, c.head_dim), latent.interleaved, rotary)
    widths, key_widths = (heads * nope, heads * rotary), (rank, rotary)
    biases: tuple[Source, ...] = ()
    if c.attention_bias:
        bias = Source(attn + "kv_a_proj_with_mqa.bias", (c.head_dim,))
        biases = bias.rows(0, rank), _halves(bias.rows(rank, c.head_dim), latent.interleaved, rotary)

    norm = f"model.layers.{i}.input_layernorm.weight"
    if not latent.q_rank and not biases:
        h = g.rms_norm(x, name + "attention_norm", norm, feeds=name + "q_kv")
        q_rows = kv_rows = g.linear(h, name + "q_kv", (*queries, *keys), (*widths, *key_widths))
        first = sum(widths)
    else:
        one = name + ("q_a" if latent.q_rank else "q")
        h = g.rms_norm(x, name + "attention_norm", norm, feeds=g.feeds_both(one, name + "kv_a"))
        kv_rows, first = g.linear(h, name + "kv_a", keys, key_widths, bias=biases), 0
        if latent.q_rank:
            h = g.linear(h, name + "q_a", (attn + "q_a_proj.weight",), (latent.q_rank,),
                         bias=(attn + "q_a_proj.bias",) if c.attention_bias else ())
            h = g.rms_norm(h, name + "q_a_norm", attn + "q_a_layernorm.weight", feeds=name + "q", eps=NORM_EPS)
        q_rows = g.linear(h, name + "q", queries, widths)

    up = Source(attn + "kv_b_proj.weight", (heads * (nope + latent.value_dim), rank))
    step = nope + latent.value_dim
    to_latent = tuple(up.rows(n * step, n * step + nope).transposed() for n in range(heads))
    from_latent = up.every(step, nope, latent.value_dim)
    absorbed = g.head_linear(q_rows, name + "k_b", to_latent, (rank, nope), heads, c.head_dim, c.head_dim)
    stored = g.store_latent(absorbed, q_rows, kv_rows, attn + "kv_a_layernorm.weight", heads * nope, first, NORM_EPS)
    h = g.head_linear(g.latent_attention(stored), name + "v_b", (from_latent,), (latent.value_dim, rank), heads,
                      latent.value_dim)
    return g.linear(h, name + "o", (attn + "o_proj.weight",), (c.hidden_size,), residual=x,
                    bias=(attn + "o_proj.bias",) if c.attention_output_bias else ())


def _halves(source: Source, interleaved: bool, rotary: int) -> Source:
    return source.rope_halves(rotary) if interleaved else source
