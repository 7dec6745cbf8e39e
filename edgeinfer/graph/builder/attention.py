"""Builder methods for attention: rotation, stored K and V, latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..ops.attention import Attention, RopeStore, RotateQueries
from ..ops.latent import HeadLinear, LatentAttention, StoreLatent
from ..ops.rows import Activate, NormPart
from ..tensors import Tensor
from ..weights import Source, as_source
from .base import BuilderBase


class AttentionWords(BuilderBase):
    """Operations on queries, keys and values."""

    def rope_store(self, qkv: Tensor, q_norm: str | Source = "", k_norm: str | Source = "") -> Tensor:
        """Normalise q and k heads where asked, rotate them, and write k and v to the layer's KV blocks.

        A layer that reads another's K and V has queries alone.
        """
        c, i = self.config, self.layer or 0
        q, k = (self._vector(f"layers.{i}.{name}", (source,), (c.head_size(i),)) if source else None
                for name, source in (("q_norm", q_norm), ("k_norm", k_norm)))
        if c.kv_layer(i) != i:
            return self._op(RotateQueries(out=self._after(qkv), q=qkv, q_norm=q, **self._rotated(i)))
        rows = self._op(RopeStore(out=self._after(qkv), qkv=qkv, q_norm=q, k_norm=k, value_norm=c.value_norm,
                                  keys_as_values=i in c.keys_as_values, beside=self._beside(qkv),
                                  **self._rotated(i)))
        return self._scaled_queries(rows) if c.query_scale else rows

    def layer_norm_heads(self, qkv: Tensor, name: str, q: tuple[str | Source, ...], k: tuple[str | Source, ...],
                         bias: tuple[str | Source, ...] = ()) -> Tensor:
        """Layer norm of each head of q and k, in place; heads of q share a weight, and those of k, or each has its own.

        `bias` names those of q and k, where all heads share one.
        """
        c, n = self.config, self.config.head_dim
        if len(q) == 1:
            for part, sources, start, pieces, shift in (
                    ("q_norm", q, 0, c.num_attention_heads, bias[:1]),
                    ("k_norm", k, c.query_width, c.num_key_value_heads, bias[1:])):
                qkv = self._op(NormPart(out=self._after(qkv), x=qkv, weight=self._vector(name + part, sources, (n,)),
                                        bias=self._vector(f"{name}{part}_bias", shift, (n,)) if shift else None,
                                        start=start, pieces=pieces, centred=True, eps=c.rms_norm_eps, layer=self.layer))
            return qkv
        heads = (*q, *k)
        ones = tuple(replace(as_source(source, (n,), name + "head_ones"), shared=True).scaled(0.0).plus(1.0)
                     for source in (heads[0], *k))
        unit = self._vector(name + "head_unit", ones[:1], (n,))
        qkv = self._op(NormPart(out=self._after(qkv), x=qkv, weight=unit, start=0, pieces=len(heads), centred=True,
                                eps=c.rms_norm_eps, layer=self.layer))
        factors = self._vector(name + "head_norms", (*heads, *ones[1:]), (n,) * (len(heads) + len(k)))
        return self._op(Activate(out=self._after(qkv), x=qkv, function="scale", factor=1.0, columns=factors,
                                 layer=self.layer))

    def _scaled_queries(self, qkv: Tensor) -> Tensor:
        """Queries times the factor of their position, which is a rotation whose sines are 0; keys stay as they are."""
        n, i = self.config.head_size(self.layer or 0), self.layer or 0
        turned = {**self._rotated(i), "rotary": n, "apart": n // 2, "table": 1}
        return self._op(RotateQueries(out=self._after(qkv), q=qkv, beside=2 * turned["kv_heads"] * n, **turned))

    def _rotated(self, i: int) -> dict[str, Any]:
        """Heads of a layer, and how they turn."""
        c, turn = self.config, self.config.turns(i)
        rope = c.rotations[turn - 1] if turn and c.rotations else None
        return {"heads": c.num_attention_heads, "kv_heads": c.kv_count(i), "head_dim": c.head_size(i),
                "eps": c.rms_norm_eps, "rotary": c.turned(rope) if rope else 0, "apart": rope.span // 2 if rope else 0,
                "table": max(turn - 1, 0), "layer": i}

    def _beside(self, qkv: Tensor) -> int:
        """Columns after queries, keys and values, such as a gate of attention's output."""
        c, i = self.config, self.layer or 0
        return qkv.width - (c.num_attention_heads + 2 * c.kv_count(i)) * c.head_size(i)

    def attention(self, qkv: Tensor, sinks: str | Source = "") -> Tensor:
        """Causal (sliding-window) attention of the rotated queries over the stored blocks of their sequences.

        `sinks` names a logit for each query head that takes part in its softmax and has no value.
        """
        c, i = self.config, self.layer or 0
        n, of = c.head_size(i), c.kv_layer(i)
        logits = self._vector(f"layers.{i}.sinks", (sinks,), (c.num_attention_heads,)) if sinks else None
        return self._op(Attention(out=self._tensor("a", c.num_attention_heads * n), qkv=qkv, head_dim=n,
                                  heads=c.num_attention_heads, kv_heads=c.kv_count(i), layer=self.layer,
                                  scale=c.attention_scale or n**-0.5, window=c.window(i), cap=c.attention_softcap,
                                  sinks=logits, kv_layer=None if of == i else of, alibi=c.alibi,
                                  beside=self._beside(qkv) if of == i else 0))

    def head_linear(self, x: Tensor, name: str, sources: tuple[Source, ...], shape: tuple[int, int], heads: int,
                    step: int, more: int = 0) -> Tensor:
        """The matmul of each head's piece of x, they are side by side, with the head's own matrix of this shape.

        It has `step` columns of the output from its piece on; after those of all heads are this many `more`.
        """
        (rows, cols), width = shape, heads * step + more
        weight = self._weight(name, "matrix", sources, ((heads * rows // len(sources), cols),) * len(sources))
        return self._op(HeadLinear(out=self._tensor(name.rsplit(".", 1)[-1], width), x=x, weight=weight, heads=heads,
                                   step=step, layer=self.layer))

    def store_latent(self, queries: Tensor, q: Tensor, compressed: Tensor, norm: str, q_first: int, first: int,
                     eps: float) -> Tensor:
        """Norm latent and rotate keys, which go to the layer's blocks and after the queries; complete these.

        Rotated parts of the queries are in `q` from a column on, latent and key in `compressed`.
        """
        c, rank = self.config, self.config.head_dim - self.config.rope_dim
        return self._op(StoreLatent(out=self._after(queries), queries=queries, q=q, compressed=compressed, rank=rank,
                                    norm=self._vector(f"layers.{self.layer}.kv_a_norm", (norm,), (rank,)),
                                    heads=c.num_attention_heads, rotary=c.rope_dim, q_first=q_first, first=first,
                                    eps=eps, layer=self.layer))

    def latent_attention(self, queries: Tensor) -> Tensor:
        """Causal attention over latent keys, whose first elements are V."""
        c, rank = self.config, self.config.head_dim - self.config.rope_dim
        return self._op(LatentAttention(out=self._tensor("a", c.num_attention_heads * rank), qkv=queries, kv_heads=1,
                                        heads=c.num_attention_heads, head_dim=c.head_dim, values=rank,
                                        scale=c.attention_scale, layer=self.layer))
