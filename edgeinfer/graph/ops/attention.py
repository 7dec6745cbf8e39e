"""Attention over the KV cache, and the rotary embedding of queries and keys before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from edgeinfer.kernels import abi

from ...base.dataclass import dataclass
from ..config import AlibiConfig
from ..tensors import Tensor, Types
from ..weights import Weight
from .base import RowOp, layer_of, other_width
from .costs import KvAccess, Read, Scratch, Sizes


@dataclass(frozen=True, kw_only=True)
class HeadOp(RowOp):
    """An operation on the query heads of a layer, groups of which share a key-value head."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Rotation(HeadOp):
    """Norms of heads if there are any, and rotary embedding (arXiv 2104.09864)."""

    KERNELS = ("rope_store_{kv}",)
    q_norm: Weight | None = None
    eps: float
    """Epsilon of the head norms."""
    rotary: int
    """Dimensions of a head that turn, the first ones; 0 = none."""
    apart: int = 0
    """Dimensions from one of a pair to the other, where that is not half of `rotary`."""
    table: int = 0
    """Index of its rotation in ModelConfig.rotations."""
    beside: int = 0
    """Columns after the heads, which stay as they are."""


@dataclass(frozen=True, kw_only=True)
class RopeStore(Rotation):
    """Norm and rotate heads of q and k, and write K and V to their blocks."""

    OVER = "qkv"
    qkv: Tensor
    k_norm: Weight | None = None
    value_norm: bool = False
    """v heads are normed, without a weight."""
    keys_as_values: bool = False
    """True if v is k before norm and rotation; its columns are made here."""

    @property
    def kv(self) -> KvAccess | None:
        """The K and V of its tokens."""
        return KvAccess(layer_of(self), self.kv_heads, self.head_dim, stores=True)

    def faults(self, types: Types) -> Iterator[str]:
        """Queries, keys and values side by side."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim + self.beside
        yield from other_width("q, k and v have together", width, self.qkv)


@dataclass(frozen=True, kw_only=True)
class RotateQueries(Rotation):
    """Process queries as `RopeStore` does, in layers that read the K and V of another one, or to scale them as well."""

    OVER = "q"
    q: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """Queries, and the columns after them."""
        yield from other_width("the query heads have", self.heads * self.head_dim + self.beside, self.q)


@dataclass(frozen=True, kw_only=True)
class Attention(HeadOp):
    """Causal attention of the rotated queries over the stored blocks of their sequences."""

    KERNELS: ClassVar[tuple[str, ...] | None] = ("attention_{kv}", "attention_merge")
    qkv: Tensor
    scale: float
    """Factor of the scores."""
    window: int = 0
    """Positions a query sees, itself included; 0 = all."""
    cap: float = 0.0
    """Scores become cap x tanh(score / cap); 0 = they stay as they are."""
    sinks: Weight | None = None
    """A logit for each query head that takes part in its softmax and has no value."""
    kv_layer: int | None = None
    """Layer whose K and V are read, if it is another one; the input then has queries alone."""
    alibi: AlibiConfig | None = None
    """ALiBi slopes, if scores fall with the distance of the key."""
    beside: int = 0
    """Columns of its input after the values, which it does not read."""

    def reads(self, types: Types) -> tuple[Read, ...]:
        """The sinks."""
        return (Read.whole(self.sinks, types),) if self.sinks else ()

    @property
    def kv(self) -> KvAccess | None:
        """Access to K and V of the rows that its tokens see, and the cost of a position."""
        width = self.heads * self.head_dim
        layer = layer_of(self) if self.kv_layer is None else self.kv_layer
        return KvAccess(layer, self.kv_heads, self.head_dim, self.window, operations=4 * width)

    def scratch(self, sizes: Sizes) -> Scratch:
        """A tile of rows; partial results of all splits, shared."""
        partial = self.heads * sizes.splits * (128 + 4 * abi.padded_head_dim(self.head_dim))
        own = abi.attention_scratch_bytes(self.head_dim, self.heads // self.kv_heads)
        return Scratch(own, sizes.split_tokens * partial)

    def faults(self, types: Types) -> Iterator[str]:
        """Queries, keys and values come in, a row for each query head goes out."""
        heads = self.heads + (2 * self.kv_heads if self.kv_layer is None else 0)
        yield from other_width("q, k and v have together", heads * self.head_dim + self.beside, self.qkv)
        yield from other_width("the query heads have", self.heads * self.head_dim, self.out)
        if self.sinks and self.sinks.shape != (self.heads,):
            yield f"there are {self.heads} query heads, but sinks of shape {list(self.sinks.shape)}"
