"""Code that families share: models with Llama's or GPT-2's names, layers with layer norms, fused tensors.

An architecture says how its checkpoint calls the parts of a layer; their use is here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from ..config import ModelConfig
from ..graph import Graph
from ..tensors import Tensor
from ..weights import Source
from .builder import GraphBuilder

Name = str | Source


class Layer(NamedTuple):
    """The tensors of a layer; biases may be left out."""

    norm: str
    """Module of the norm before the attention."""
    qkv: tuple[Name, ...]
    o: Name
    up: Name
    down: Name
    ffn_norm: str = ""
    """Module of the norm before the FFN; without one, attention and FFN, side by side, share the first."""
    gate: Name = ""
    qkv_bias: tuple[Name, ...] = ()
    o_bias: tuple[Name, ...] = ()
    ffn_bias: tuple[Name, ...] = ()
    """Biases of up and down; none of FFNs with a gate."""
    norm_bias: bool = True
    q_norm: tuple[Name, ...] = ()
    """Weights of layer norms of heads: one for all, or one for each."""
    k_norm: tuple[Name, ...] = ()
    head_norm_bias: tuple[Name, ...] = ()
    """Biases of the norms of q and k."""


GPT_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
             "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
"""Names of the sizes in configs of GPT-2's kind (`ConfigReader.called`)."""


def llama_like(g: GraphBuilder, c: ModelConfig, block: Callable[..., Tensor], norm: Name = "model.norm.weight",
               **how: Any) -> Graph:
    """Write tokens to logits where embedding and head have Llama's names, and the last norm has that name or another.

    ``block(g, c, x, i, **how)`` writes a layer.
    """
    x = g.embed("model.embed_tokens.weight")
    for i in range(c.num_hidden_layers):
        x = block(g, c, x, i, **how)
    return g.build(g.logits(x, norm, "lm_head.weight"))


LLAMA_NAMES: dict[str, Any] = {"embed": "model.embed_tokens", "layers": "model.layers.", "norm": "model.norm",
                               "positions": ""}
"""Modules of `gpt_like` in models that have Llama's names."""


def gpt_like(g: GraphBuilder, c: ModelConfig, parts: Callable[[ModelConfig, str], Layer], *,
             embed: str = "transformer.wte", embed_norm: str = "", positions: str = "transformer.wpe",
             layers: str = "transformer.h.", norm: str = "transformer.ln_f", norm_bias: bool = True,
             head: str = "lm_head", head_bias: bool = False) -> Graph:
    """Write tokens to logits of a model with layer norms; its modules have GPT-2's names unless others are given.

    ``parts(c, prefix)`` names the tensors of a layer. Positions are learned, unless the name of their module is empty.
    """
    x = g.embed(embed + ".weight")
    if embed_norm:
        x = g.layer_norm(x, "embed_norm", embed_norm + ".weight", embed_norm + ".bias")
    if positions:
        x = g.add_positions(x, positions + ".weight")
    for i in range(c.num_hidden_layers):
        x = layer(g, c, x, i, parts(c, f"{layers}{i}."))
    return g.build(g.logits(x, norm + ".weight", head + ".weight", layer_norm=True,
                            norm_bias=norm + ".bias" if norm_bias else "",
                            head_bias=head + ".bias" if head_bias else ""))


def layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, parts: Layer) -> Tensor:
    """One block: x + attention(norm(x)), then + FFN(norm(x)), of the sum or, side by side, of x."""
    g.layer, name = i, f"layers.{i}."
    other = None
    if c.parallel_residual and not parts.ffn_norm:
        h = other = _norm(g, x, name + "attention_norm", parts.norm, parts)
    elif c.parallel_residual:
        other = _norm(g, x, name + "ffn_norm", parts.ffn_norm, parts)
    if other is None or parts.ffn_norm:
        h = _norm(g, x, name + "attention_norm", parts.norm, parts)
    widths = (c.query_width, c.kv_width, c.kv_width)
    h = g.linear(h, name + "qkv", parts.qkv, widths, bias=parts.qkv_bias)
    if parts.q_norm:
        h = g.layer_norm_heads(h, name, parts.q_norm, parts.k_norm, parts.head_norm_bias)
    h = g.attention(g.rope_store(h))
    x = g.linear(h, name + "o", (parts.o,), (c.hidden_size,), residual=x, bias=parts.o_bias)
    h = _norm(g, x, name + "ffn_norm", parts.ffn_norm, parts) if other is None else other
    if parts.gate:
        return g.ffn(h, name, (parts.gate, parts.up, parts.down), residual=x)
    return g.plain_ffn(h, name, parts.up, parts.down, residual=x, bias=parts.ffn_bias)


def normed_layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, parts: Layer) -> Tensor:
    """One block: norm(x + attention(x)), then the same with the FFN, which has no gate."""
    g.layer, name, widths = i, f"layers.{i}.", (c.query_width, c.kv_width, c.kv_width)
    h = g.attention(g.rope_store(g.linear(x, name + "qkv", parts.qkv, widths, bias=parts.qkv_bias)))
    x = g.linear(h, name + "o", (parts.o,), (c.hidden_size,), residual=x, bias=parts.o_bias)
    x = _norm(g, x, name + "attention_norm", parts.norm, parts)
    x = g.plain_ffn(x, name, parts.up, parts.down, residual=x, bias=parts.ffn_bias)
    return _norm(g, x, name + "ffn_norm", parts.ffn_norm, parts)


def _norm(g: GraphBuilder, x: Tensor, name: str, module: str, parts: Layer) -> Tensor:
    return g.layer_norm(x, name, module + ".weight", module + ".bias" if parts.norm_bias else "")


def heads_of(fused: Source, c: ModelConfig) -> tuple[Source, Source, Source]:
    """Queries, keys and values of a tensor that has, of each KV head, the query heads, then the key, then the value."""
    n = c.head_dim
    group = (c.num_attention_heads // c.num_key_value_heads) * n
    step = group + 2 * n
    return fused.every(step, 0, group), fused.every(step, group, n), fused.every(step, group + n, n)


def rows_of(fused: Source, c: ModelConfig) -> tuple[Source, Source, Source]:
    """Queries, keys and values of a tensor that has all queries, then all keys, then all values."""
    ends = (0, c.query_width, c.query_width + c.kv_width, c.query_width + 2 * c.kv_width)
    q, k, v = (fused.rows(a, b) for a, b in pairwise(ends))
    return q, k, v


def neighbours_of(attn: str, kind: str, c: ModelConfig, *columns: int) -> tuple[Source, Source, Source]:
    """Queries, keys and values of a module whose neighbours turn in pairs; our rotation turns halves of a head."""
    widths = (c.query_width, c.kv_width, c.kv_width)
    q, k, v = (Source(f"{attn}{p}_proj.{kind}", (w, *columns)) for p, w in zip("qkv", widths, strict=True))
    return q.rope_halves(c.head_dim, c.rope_dim), k.rope_halves(c.head_dim, c.rope_dim), v


def gate_up_of(mlp: str, c: ModelConfig) -> tuple[Source, Source, Source]:
    """Gate, up and down of an FFN whose gate and up are rows of one tensor."""
    n, d = c.intermediate_size, c.hidden_size
    both = Source(mlp + "gate_up_proj.weight", (2 * n, d))
    return both.rows(0, n), both.rows(n, 2 * n), Source(mlp + "down_proj.weight", (d, n))
