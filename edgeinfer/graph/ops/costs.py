"""Costs of an operation: weights and KV that it reads, pieces that may stay in storage, and scratch memory."""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.kernels import abi

from ..tensors import Types
from ..topn_cost import TopNCost
from ..weights import Weight


class Read(NamedTuple):
    """Part of a weight that an operation reads."""

    weight: Weight
    token: float
    """Bytes for one token."""
    batch: int
    """Bytes for a forward pass over many tokens, which needs all experts."""

    @classmethod
    def whole(cls, weight: Weight, types: Types) -> Read:
        """Return the read of a whole weight, independent of the tokens."""
        nbytes = types[weight.name].nbytes(weight.shape)
        return cls(weight, nbytes, nbytes)


class KvAccess(NamedTuple):
    """The K and V that an operation stores or reads."""

    layer: int
    heads: int
    """Key-value heads."""
    head_dim: int
    window: int = 0
    """Positions that a token sees, itself included; 0 = all."""
    stores: bool = False
    """True if it stores the K and V of its tokens; else it reads those of the context."""
    operations: int = 0
    """Multiplications and additions per token and position that it sees."""
    topn: TopNCost | None = None
    """Selection of V's rows for decoded tokens; None reads all of them."""
    latent: bool = False
    """True if V is the beginning of K, and not stored by itself."""

    def position_bytes(self, kv: str) -> int:
        """Bytes of K and V, with their scales, of one position."""
        return self.heads * abi.kv_head_bytes(kv, self.head_dim, self.latent) // abi.BLOCK_TOKENS

    @property
    def values(self) -> int:
        """Elements of K and V of one position."""
        return (1 if self.latent else 2) * self.heads * self.head_dim

    def read_bytes(self, kv: str, length: int) -> int:
        """Bytes that one token reads where `length` tokens are stored, itself included, and it chooses no rows."""
        return (min(length, self.window) if self.window else length) * self.position_bytes(kv)

    def chosen_bytes(self, kv: str, length: int) -> tuple[float, float]:
        """Bytes of K and about how many of V a decoded token reads that chooses rows."""
        assert self.topn
        half = self.position_bytes(kv) / 2
        return half * length, half * self.topn.rows(length)


class OnDemand(NamedTuple):
    """A weight of which a token needs a few pieces: the planner may leave the others in storage."""

    kind: str
    """``experts``, ``neurons``, or ``rows`` of a table."""
    layer: int
    weight: Weight
    pieces: int
    nbytes: int
    """Bytes of a piece in this weight, such as an expert's gate and up, or its down."""
    active: int = 0
    """Experts that a token goes through."""
    chosen: bool = True
    """True if it is known which pieces a decoded token needs before any is read."""


class Scratch(NamedTuple):
    """Memory that a kernel needs while it runs."""

    thread_bytes: int = 0
    """Bytes of each thread."""
    shared_bytes: int = 0
    """Bytes that threads share."""


class Sizes(NamedTuple):
    """Sizes of a run that scratch may depend on."""

    types: Types
    splits: int
    """Splits of the longest context (abi.SPLIT_BLOCKS)."""
    split_tokens: int
    """Most tokens of a forward pass whose attention is split along the context."""
    decoded_tokens: int
    """Most tokens of a forward pass in decode role."""
