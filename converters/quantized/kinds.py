"""Kinds of quantised tensors of checkpoints, and which of our types hold them."""

from __future__ import annotations

import re

from edgeinfer.base.dataclass import dataclass
from edgeinfer.quant import TYPES, WeightType

F16, F32 = WeightType("f16"), WeightType("f32")
PLAIN = {"F16": (F16, F32), "BF16": (F16, F32), "F32": (F32,), "F64": (F32,)}
"""Storage types for float tensors; in f16, BF16 values below 6e-5 are rounded, which is reported."""
OWN_ERROR = {
    ("int4", 32): 8.9e-3, ("int4", 64): 1.0e-2, ("int4", 128): 1.3e-2, ("int4", 0): 1.3e-2,
    ("uint4", 32): 6.4e-3, ("uint4", 64): 8.2e-3, ("uint4", 128): 1.0e-2, ("uint4", 0): 1.1e-2,
    ("int8", 32): 3.1e-5, ("int8", 64): 3.6e-5, ("int8", 128): 4.3e-5, ("int8", 0): 4.5e-5,
    ("uint8", 32): 2.2e-5, ("uint8", 64): 2.8e-5, ("uint8", 128): 3.5e-5, ("uint8", 0): 3.8e-5,
    ("uint2", 32): 1.5e-1, ("uint2", 64): 2.0e-1, ("uint2", 128): 2.5e-1,
    ("uint3", 32): 2.8e-2, ("uint3", 64): 3.7e-2, ("uint3", 128): 4.6e-2,
    ("uint5", 32): 1.4e-3, ("uint5", 64): 1.9e-3, ("uint5", 128): 2.3e-3,
    ("uint6", 32): 3.5e-4, ("uint6", 64): 4.6e-4, ("uint6", 128): 5.6e-4,
    ("e4m3", 32): 7.0e-4, ("e4m3", 128): 7.0e-4, ("e4m3", 0): 7.0e-4, ("e2m1", 16): 8.9e-3, ("e2m1", 32): 1.3e-2,
}
"""Squared error of weights / their squared norm by kind of codes and group, rounded to the nearest: on matrices of
trained small models. The loss of the checkpoint itself is not known."""


_HELD = {"int2": ("q2", "q4", "int8"), "int4": ("q4", "int8"), "int8": ("int8",), "uint2": ("q4m",),
         "uint3": ("q4m",), "uint4": ("q4m",), "uint5": ("q5m",), "e2m1": ("mxfp4",)}
"""Types that take codes as they are: those of fewer bits are some of a wider type's."""


@dataclass(frozen=True)
class PackedKind:
    """Encoding of one tensor's weights: weight = (code - zero point) x scale, or code x scale + minimum."""

    packing: str
    """Name of the method, such as GPTQ."""
    codes: str
    """int2, int4 and int8 (symmetric), uint2 to uint8 (with a zero point or a minimum), e4m3, e2m1."""
    group_size: int = 0
    """Columns that share a scale; 0 for a whole row."""
    rows: int = 1
    """Rows that do."""
    ordered: bool = False
    """True if columns are in groups in another order than their own."""
    order: str = ""
    """Names that order, where it fills the groups one after the other: equal names are equal orders."""

    @property
    def name(self) -> str:
        """Name for people, such as ``GPTQ int4 g128``."""
        group = f"{self.rows}x{self.group_size}" if self.rows > 1 else f"g{self.group_size}"
        order = " act-order" if self.ordered else ""
        return f"{self.packing} {self.codes} {group if self.group_size else 'by row'}{order}"

    @property
    def held(self) -> tuple[WeightType, ...]:
        """Storage types that hold its codes unchanged, the smallest first."""
        wanted = _HELD.get(self.codes, ())
        if self.ordered != bool(self.order) or self.rows > 1:
            return ()
        return tuple(WeightType(name, group) for name in wanted for group in reversed(TYPES[name].groups)
                     if self.group_size % group == 0)

    @property
    def choices(self) -> tuple[WeightType, ...]:
        """Storage types that hold its values without requantisation, the smallest first; f32 alone if others cost
        accuracy.

        In f16 a weight of 6 or 8 bits, or of NVFP4, is off by at most 4.9e-4 of itself; f16 would be four times the
        size of other 4-bit weights. The minimum of zero points is their product with a scale, rounded to fp16.
        """
        if self.held:
            return *self.held, F16, F32
        return (F16, F32) if self.codes in ("int8", "uint6", "uint8", "e4m3", "e2m1") else (F32,)


def own_error(name: str) -> float:
    """Return the typical rounding error of a kind, by the kind's name; 0 if it is not known."""
    found = re.search(r" (u?int[2-68]|e4m3|e2m1) (?:g|\d+x|by row)(\d*)", name)
    return OWN_ERROR.get((found[1], int(found[2] or 0)), 0.0) if found else 0.0
