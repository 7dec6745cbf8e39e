"""Kinds of quantised tensors of checkpoints, and which of our types hold them."""

from __future__ import annotations

import re

from edgeinfer.dataclass import dataclass
from edgeinfer.graph import WeightType
from edgeinfer.quant import TYPES

F16, F32 = WeightType("f16"), WeightType("f32")
PLAIN = {"F16": (F16, F32), "BF16": (F16, F32), "F32": (F32,), "F64": (F32,)}
"""What holds tensors of floats; BF16 is rounded in f16 where it is below 6e-5, and that is told."""
OWN_ERROR = {
    ("int4", 32): 8.9e-3, ("int4", 64): 1.0e-2, ("int4", 128): 1.3e-2, ("int4", 0): 1.3e-2,
    ("uint4", 32): 6.4e-3, ("uint4", 64): 8.2e-3, ("uint4", 128): 1.0e-2, ("uint4", 0): 1.1e-2,
    ("int8", 32): 3.1e-5, ("int8", 64): 3.6e-5, ("int8", 128): 4.3e-5, ("int8", 0): 4.5e-5,
    ("uint8", 32): 2.2e-5, ("uint8", 64): 2.8e-5, ("uint8", 128): 3.5e-5, ("uint8", 0): 3.8e-5,
    ("e4m3", 128): 7.0e-4, ("e4m3", 0): 7.0e-4,
}
"""Squared error of weights / their squared norm by kind of codes and group, rounded to the nearest: on matrices of
trained small models. What a checkpoint itself has lost cannot be known from it."""


@dataclass(frozen=True)
class PackedKind:
    """How the weights of one tensor are coded: weight = (code - zero point) x scale, or code x scale + minimum."""

    packing: str
    """Such as GPTQ."""
    codes: str
    """int4 and int8 (symmetric), uint4 and uint8 (with a zero point or a minimum), e4m3, e2m1."""
    group_size: int = 0
    """Columns that share a scale; 0 for a whole row."""
    rows: int = 1
    """Rows that do."""
    ordered: bool = False
    """Whether columns are in groups in another order than their own."""
    order: str = ""
    """Names that order, where it fills the groups one after the other: equal names are equal orders."""

    @property
    def name(self) -> str:
        """Such as ``GPTQ int4 g128``."""
        group = f"{self.rows}x{self.group_size}" if self.rows > 1 else f"g{self.group_size}"
        order = " act-order" if self.ordered else ""
        return f"{self.packing} {self.codes} {group if self.group_size else 'by row'}{order}"

    @property
    def held(self) -> tuple[WeightType, ...]:
        """What takes its codes as they are, the smallest first."""
        wanted = {"int4": ("q4", "int8"), "int8": ("int8",), "uint4": ("q4m",), "e2m1": ("mxfp4",)}.get(self.codes, ())
        if self.ordered != bool(self.order) or self.rows > 1:
            return ()
        return tuple(WeightType(name, group) for name in wanted for group in reversed(TYPES[name].groups)
                     if self.group_size % group == 0)

    @property
    def choices(self) -> tuple[WeightType, ...]:
        """What holds its values without quantising them anew, the smallest first; f32 alone where that is dear.

        In f16 a weight of 8 bits is off by 4.9e-4 of itself at most; for 4 bits that would be four times the size.
        The minimum of zero points is their product with a scale, rounded to fp16.
        """
        if self.held:
            return *self.held, F16, F32
        return (F16, F32) if self.codes in ("int8", "uint8", "e4m3") else (F32,)


def own_error(name: str) -> float:
    """What rounding to codes of a kind typically loses, by the kind's name; 0 where that is not known."""
    found = re.search(r" (u?int[48]|e4m3) (?:g|\d+x|by row)(\d*)", name)
    return OWN_ERROR.get((found[1], int(found[2] or 0)), 0.0) if found else 0.0
