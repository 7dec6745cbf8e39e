"""Operations on rows of activations, and attention; products.py has those with matrices, operation.py the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from edgeinfer.kernels import abi

from ..dataclass import dataclass
from ..sizes import round_up
from .operation import KvAccess, Op, Read, RowOp, Scratch, Sizes, other_width
from .types import Tensor, Types
from .weights import Weight

# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Embed(RowOp):
    """Row of each token in a table."""

    KERNELS = ("embed_{stored.suffix}",)
    table: Weight

    def reads(self, types: Types) -> tuple[Read, ...]:
        """One row a token, which is left out beside the matrices."""
        return ()

    def faults(self, types: Types) -> Iterator[str]:
        """The table's rows are the output's."""
        yield from other_width("the table has rows of", self.table.shape[1], self.out)


@dataclass(frozen=True, kw_only=True)
class RmsNorm(RowOp):
    """Root-mean-square norm (arXiv 1910.07467), quantised on the way out where its readers want that."""

    KERNELS = ("rms_norm_{out.dtype}",)
    x: Tensor
    weight: Weight
    eps: float

    def scratch(self, sizes: Sizes) -> Scratch:
        """A row of floats before it is quantised."""
        return Scratch(4 * round_up(self.x.width, 16) if self.out.dtype == "q8" else 0)

    def faults(self, types: Types) -> Iterator[str]:
        """All rows are as wide as the weight."""
        yield from other_width("the norm's weight has", self.weight.shape[0], self.x)
        yield from other_width("the norm's weight has", self.weight.shape[0], self.out)


@dataclass(frozen=True, kw_only=True)
class Quantize(RowOp):
    """Rows, or their beginnings, to int8 with a scale for each group."""

    KERNELS = ("quantize",)
    x: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """Rows get no longer."""
        if self.out.width > self.x.width:
            yield from other_width("the input has rows of", self.x.width, self.out)


@dataclass(frozen=True, kw_only=True)
class GatherOutputs(RowOp):
    """The rows whose logits are wanted."""

    KERNELS = ("gather_outputs",)
    x: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """Rows keep their width."""
        yield from other_width("the input has rows of", self.x.width, self.out)


@dataclass(frozen=True, kw_only=True)
class Draw(RowOp):
    """The next token of each row of logits for which a draw is listed; the output is what the kernels work with."""

    KERNELS = ("draw_edit", "draw_blocks", "draw_choose")
    logits: Tensor

    def faults(self, types: Types) -> Iterator[str]:
        """A row of work is as long as the vocabulary needs."""
        yield from other_width("the work takes", abi.draw_row(self.logits.width)[0] // 4, self.out)


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RopeStore(RowOp):
    """Norms of q and k heads where there are any, rotary embedding (arXiv 2104.09864), and K and V to their blocks."""

    KERNELS = ("rope_store_{kv}",)
    OVER = "qkv"
    qkv: Tensor
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Of the head norms."""

    @property
    def kv(self) -> KvAccess | None:
        """The K and V of its tokens."""
        return KvAccess(_layer(self), self.kv_heads, self.head_dim, stores=True)

    def faults(self, types: Types) -> Iterator[str]:
        """Queries, keys and values side by side."""
        yield from other_width("q, k and v have together", (self.heads + 2 * self.kv_heads) * self.head_dim, self.qkv)


@dataclass(frozen=True, kw_only=True)
class Attention(RowOp):
    """Causal attention of the rotated queries over the stored blocks of their sequences."""

    KERNELS: ClassVar[tuple[str, ...] | None] = ("attention_{kv}", "attention_merge")
    qkv: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    """Positions a query sees, itself included; 0 = all."""

    @property
    def kv(self) -> KvAccess | None:
        """K and V of what its tokens see, and what a position costs."""
        width = self.heads * self.head_dim
        return KvAccess(_layer(self), self.kv_heads, self.head_dim, self.window, operations=4 * width)

    def scratch(self, sizes: Sizes) -> Scratch:
        """A tile of rows; partial results of all splits, shared."""
        partial = self.heads * sizes.splits * (128 + 4 * abi.padded_head_dim(self.head_dim))
        own = abi.attention_scratch_bytes(self.head_dim, self.heads // self.kv_heads)
        return Scratch(own, sizes.split_tokens * partial)

    def faults(self, types: Types) -> Iterator[str]:
        """Queries, keys and values come in, a row for each query head goes out."""
        yield from other_width("q, k and v have together", (self.heads + 2 * self.kv_heads) * self.head_dim, self.qkv)
        yield from other_width("the query heads have", self.heads * self.head_dim, self.out)


def _layer(op: Op) -> int:
    if op.layer is None:
        raise ValueError(f"The operation {op.name} needs a layer.")
    return op.layer
