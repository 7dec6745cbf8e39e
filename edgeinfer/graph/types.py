"""The graph: typed operations on named tensors. Everything later (plan, program, estimate, twins) reads these records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .config import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One stored matrix or vector, and the checkpoint tensors it is made of."""

    name: str
    """Name in the bundle's tensor table, such as ``layers.0.qkv``."""
    shape: tuple[int, ...]
    """Shape as stored: (rows, cols) = (out_features, in_features), or (n,) for a vector."""
    kind: str
    """``matrix`` (the layers' linear weights), ``embedding``, ``head`` or ``vector`` (norms and biases, always f32)."""
    sources: tuple[str, ...]
    """Names in a Hugging Face checkpoint, in order."""
    source_shapes: tuple[tuple[int, ...], ...]
    """Shapes that the checkpoint must have."""
    combine: str = "concat"
    """``concat`` along rows, or ``interleave16``: rows padded to 16 per source, then alternating by tile of 16."""


@dataclass(frozen=True)
class WeightType:
    """How a weight is stored."""

    dtype: str
    """q4, int8, f16 or f32."""
    group_size: int = 0
    """Columns that share one fp16 scale (32, 64, 128); 0 for f16 and f32."""
    layout: str = "tile16"
    """tile16, neuron or plain (vectors)."""

    @property
    def quantised(self) -> bool:
        """True where the kernels multiply int8 activations."""
        return self.dtype in ("q4", "int8")


@dataclass(frozen=True)
class Tensor:
    """An activation: one row of `width` elements per token (or per output row)."""

    name: str
    width: int
    """Elements of a row, without padding."""
    dtype: str = "f32"
    """f32, or q8: int8 values with an f32 scale and an int32 sum per group."""
    group_size: int = 0
    """Elements that share one scale (q8 only)."""
    rows: str = "tokens"
    """``tokens`` (every token of the walk) or ``outputs`` (the rows whose logits are wanted)."""


@dataclass(frozen=True)
class Op:
    """One operation. `attributes` hold numbers only, so that a graph can be printed, compared and stored."""

    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Weight, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    in_place: bool = False
    """The first output takes the memory of the last input (residual sums, rotary embedding)."""


@dataclass(frozen=True)
class Graph:
    """One architecture's forward pass over a flat list of tokens."""

    config: ModelConfig
    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    types: dict[str, WeightType]
    """Storage of each weight, by name."""
    logits: Tensor
