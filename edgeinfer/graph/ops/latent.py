"""Operations of multi-head latent attention (MLA, arXiv 2405.04434) in its absorbed form.

A token's KV is one latent, normed, and one rotated part that all heads share: one KV head, whose V is the latent and
not stored. A head's part of the latent's projection is applied to its query before attention and to its result after
it: two matmuls with a matrix for each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from edgeinfer.kernels import abi

from ...base.dataclass import dataclass
from ...base.units import round_up
from ...quant import KV_TYPES
from ..tensors import Number, Tensor, Types
from ..weights import Weight
from .attention import Attention
from .base import Op, RowOp, layer_of, other_width
from .costs import KvAccess, Scratch, Sizes
from .matmul import MatMul


@dataclass(frozen=True, kw_only=True)
class QuantizeHeads(RowOp):
    """The beginning of each row in pieces of a head each, to int8: rows of all tokens for each head."""

    KERNELS = ("quantize",)
    x: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """Rows have as much, and were floats."""
        if self.out.times * self.out.width > self.x.width:
            yield f"{self.out.times} heads of {self.out.width} are more than {self.x} has"
        if self.x.dtype != "f32":
            yield f"{self.x} is quantised already"


@dataclass(frozen=True, kw_only=True)
class HeadLinear(MatMul):
    """x W^T, head by head: one matrix per head, one after the other, and columns of the output for each."""

    KERNELS = ("linear_{stored.suffix}",)
    heads: int
    step: int
    """Columns from one head's part of the output to the next's."""

    @property
    def rows(self) -> int:
        """Rows of a head's matrix."""
        return self.weight.shape[0] // self.heads

    def quantiser(self, x: Tensor, group: int, number: Number) -> Op:
        """Quantise the piece of each head."""
        out = Tensor(number("q"), self.weight.shape[-1], "q8", group, x.rows, self.heads)
        return QuantizeHeads(out=out, x=x, layer=self.layer)

    def faults(self, types: Types) -> Iterator[str]:
        """Whole tiles of rows, that fit into the output; x has a row, or a piece of one, for each head."""
        cols, stored = self.weight.shape[-1], types[self.weight.name]
        if self.rows % 16 or self.rows > self.step or self.heads * self.step > self.out.width:
            yield f"{self.heads} heads of {self.rows} rows, {self.step} columns apart, do not fit into {self.out}"
        if stored.quantised != (self.x.dtype == "q8") or self.x.group_size != stored.input_group:
            yield f"{self.x} is not in the form that matmuls with {stored} take"
        if self.x.dtype == "q8" and (self.x.times, self.x.width) != (self.heads, cols):
            yield f"{self.x} is not {self.heads} heads of {cols}"
        if self.x.dtype != "q8" and self.heads * cols > self.x.width:
            yield f"{self.x} has no {self.heads} heads of {cols}"


@dataclass(frozen=True, kw_only=True)
class StoreLatent(RowOp):
    """Norm of the latent, rotary embedding (arXiv 2104.09864), and K to its blocks; rotated parts into the queries."""

    KERNELS = ("store_latent_{kv}",)
    OVER = "queries"
    queries: Tensor
    """Queries of each head for the latent, with room for the rotated part; then room for the key."""
    q: Tensor
    """Has the rotated parts of the queries from `q_first` on."""
    compressed: Tensor
    """Has the latent and the rotated part of the key from `first` on."""
    norm: Weight
    heads: int
    rank: int
    """Width of the latent."""
    rotary: int
    q_first: int
    first: int
    eps: float

    @property
    def kv(self) -> KvAccess | None:
        """The K of its tokens."""
        return KvAccess(layer_of(self), 1, self.rank + self.rotary, stores=True, latent=True)

    def faults(self, types: Types) -> Iterator[str]:
        """All parts are there."""
        yield from other_width("queries and key have", (self.heads + 1) * (self.rank + self.rotary), self.queries)
        yield from other_width("the norm's weight has", self.norm.shape[0], Tensor("the latent", self.rank))
        if self.q_first + self.heads * self.rotary > self.q.width \
                or self.first + self.rank + self.rotary > self.compressed.width:
            yield f"{self.q} or {self.compressed} lacks parts of queries or key"


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Causal attention over latent keys, whose first `values` elements are V."""

    KERNELS: ClassVar[tuple[str, ...] | None] = ("attention_{kv}", "attention_merge")
    values: int

    @property
    def kv(self) -> KvAccess | None:
        """Access to K of the rows that its tokens see, and the cost of a position."""
        return KvAccess(layer_of(self), 1, self.head_dim, operations=2 * self.heads * (self.head_dim + self.values),
                        latent=True)

    @property
    def turned(self) -> int:
        """Return the offset in a thread's scratch at which a split's V is computed, after the scratch of attention."""
        return round_up(abi.attention_scratch_bytes(self.head_dim, self.heads), 64)

    def scratch(self, sizes: Sizes) -> Scratch:
        """Return the scratch memory of attention, and that of the V of a split."""
        partial = self.heads * sizes.splits * (128 + 4 * abi.padded_head_dim(self.values))
        room = abi.SPLIT_BLOCKS * max(abi.kv_block_bytes(kv, self.values) for kv in KV_TYPES)
        return Scratch(self.turned + room, sizes.split_tokens * partial)

    def faults(self, types: Types) -> Iterator[str]:
        """Queries and the key come in, a row of V's width for each head goes out."""
        yield from other_width("queries and key have", (self.heads + 1) * self.head_dim, self.qkv)
        yield from other_width("the heads' values have", self.heads * self.values, self.out)
        if self.values % 16 or self.values > self.head_dim:
            yield f"V is {self.values} of a key's {self.head_dim} elements; it must be a multiple of 16"
