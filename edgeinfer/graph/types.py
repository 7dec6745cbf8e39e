"""The graph: typed operations on named tensors. Plan, program, estimate and twins all read these records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .config import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One stored matrix or vector, and the checkpoint tensors it is made of."""

    name: str
    """Name in the bundle's tensor table, such as ``layers.0.qkv``."""
    shape: tuple[int, ...]
    """Shape as stored: (rows, cols) = (out_features, in_features), (n,) for a vector, (intermediate_size, 3,
    hidden_size) for an FFN."""
    kind: str
    """``matrix`` (the layers' linear weights), ``ffn`` (gate, up and down in one, neuron by neuron), ``embedding``,
    ``head`` or ``vector`` (norms and biases, always f32)."""
    sources: tuple[str, ...]
    """Names in a Hugging Face checkpoint, in order."""
    source_shapes: tuple[tuple[int, ...], ...]
    """Shapes that the checkpoint must have."""
    combine: str = "concat"
    """``concat`` along rows; ``interleave16``: rows padded to 16 per source, then alternating by tile of 16;
    ``neurons``: a row of each of the first two sources, then a column of the third."""


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

    def __str__(self) -> str:
        kind = f"{self.dtype}g{self.group_size}" if self.group_size else self.dtype
        return f"{kind} by neuron" if self.layout == "neuron" else kind


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

    def __str__(self) -> str:
        kind = f"{self.dtype}g{self.group_size}" if self.group_size else self.dtype
        return f"{self.name}[{self.rows} x {self.width} {kind}]"


@dataclass(frozen=True)
class Op:
    """One operation. `attributes` hold numbers and names only, so that a graph can be printed, compared and stored."""

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

    @property
    def weight_count(self) -> int:
        """Parameters of the model, without padding; tied matrices count once."""
        return sum(math.prod(shape) for weight in self.weights for shape in weight.source_shapes)

    @property
    def activation_values(self) -> float:
        """Values that go into and come out of the matrices of all layers for one token; of experts the active ones."""
        total = 0.0
        for op in self.ops:
            if op.kind in ("linear", "gated") and op.weights[0].name.startswith("layers."):
                share = float(op.attributes.get("active", 1)) / float(op.attributes.get("experts", 1))
                total += share * sum(op.weights[0].shape)
            elif op.kind == "neuron_gated":  # as the two matrices that it stands for
                neurons, _, hidden = op.weights[0].shape
                total += 3 * neurons + 2 * hidden
        return total

    def describe(self) -> str:
        """One line per operation: outputs, kind, attributes, inputs, weights with their shape and storage."""
        return "\n".join(self._line(op) for op in self.ops)

    def _line(self, op: Op) -> str:
        numbers = "".join(f" {key}={value}" for key, value in op.attributes.items())
        weights = [f"{w.name} {'x'.join(map(str, w.shape))} {self.types[w.name]}" for w in op.weights]
        arguments = ", ".join([str(t) for t in op.inputs] + weights)
        sign = "+=" if op.in_place and len(op.inputs) > 1 else "="
        return f"{', '.join(map(str, op.outputs))} {sign} {op.kind}{numbers}({arguments})"
