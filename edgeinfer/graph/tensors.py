"""Weights and activations, the operands of operations."""

from __future__ import annotations

from collections.abc import Callable

from ..base.dataclass import dataclass
from ..quant import WeightType


@dataclass(frozen=True)
class Tensor:
    """An activation: one row of `width` elements per token (or per output row)."""

    name: str
    width: int
    """Elements of a row, without padding."""
    dtype: str = "f32"
    """f32, or q8: int8 values with an f32 scale and an int32 offset per group (abi.q8_row_bytes)."""
    group_size: int = 0
    """Elements that share one scale (q8 only)."""
    rows: str = "tokens"
    """``tokens`` (every token of the forward pass) or ``outputs`` (the rows whose logits are wanted)."""
    times: int = 1
    """Rows for each of these: of an MoE model one for each expert that a token goes through."""
    apart: int = 0
    """Floats at the end of a q8 row: the elements that are outliers, zeros before."""

    def __str__(self) -> str:
        kind = f"{self.dtype}g{self.group_size}" if self.group_size else self.dtype
        rows = self.rows if self.times == 1 else f"{self.times} {self.rows}"
        return f"{self.name}[{rows} x {self.width} {kind}]"


RowType = tuple[str, int]
"""Type of rows and elements that share a scale: ("f32", 0), or q8 in groups."""
Number = Callable[[str], str]
"""Gives the first part of a tensor's name the next number: ``q`` becomes ``q.7``."""
Types = dict[str, WeightType]
"""Storage of each weight, by name."""
