"""Types of tensors in GGUF files, and the storage types that hold them exactly."""

from __future__ import annotations

from edgeinfer.base.dataclass import dataclass
from edgeinfer.quant import WeightType


@dataclass(frozen=True)
class GgufType:
    """Encoding of a row's elements in a file: block by block."""

    name: str
    elements: int
    """Elements of a block."""
    nbytes: int
    """Bytes of a block."""

    def bytes_of(self, elements: int) -> int:
        """Bytes of this many elements, which are whole blocks."""
        return elements // self.elements * self.nbytes


GGUF_TYPES = {
    number: GgufType(*row)
    for number, row in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
        42: ("Q2_0", 64, 18),
    }.items()
}
"""Types by their number in a file's table of tensors."""
BY_NAME = {row.name: row for row in GGUF_TYPES.values()}

_Q4, _INT8 = WeightType("q4", 32), WeightType("int8", 32)
_HOLD_Q2 = WeightType("q2", 64), _Q4, _INT8
_F32 = WeightType("f32")
TERNARY = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
"""Types whose codes are from -1 to 2."""
EXACT = {
    "Q4_0": (_Q4, _INT8, _F32),
    **dict.fromkeys(TERNARY, (WeightType("q2", 128), *_HOLD_Q2, _F32)),
    "Q2_0": (*_HOLD_Q2, _F32),
    "Q4_1": (WeightType.of("q4m"), _F32),
    "Q5_0": (WeightType.of("q5"), _F32),
    "Q5_1": (WeightType.of("q5m"), _F32),
    "Q8_0": (_INT8, _F32),
    "Q4_K": (WeightType.of("q4k"), _F32),
    "Q5_K": (WeightType.of("q5k"), _F32),
    "Q6_K": (WeightType.of("q6"), _F32),
    "IQ4_NL": (WeightType.of("iq4"), _F32),
    "IQ4_XS": (WeightType.of("iq4k"), _F32),
    "MXFP4": (WeightType.of("mxfp4"), _F32),
    "F16": (WeightType("f16"), _F32),
    "BF16": (_F32,),
    "F32": (_F32,),
}
"""Storage types that hold all values of a file's type, the smallest first: codes and scales stay as they are, and f32
holds the results of ggml's own dequantisation.
"""
INEXACT = ("NVFP4", "IQ3_S", "Q3_K", "IQ3_XXS", "IQ2_S", "Q2_K", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
"""Types whose levels and groups no storage type has: their values are requantised to `REQUANTISED`."""
REQUANTISED = _Q4
"""The smallest type that floats can be quantised to."""
REQUANTISED_ERROR = {
    "NVFP4": (9.1e-3, 1.5e-2), "IQ3_S": (1.9e-2, 2.6e-2), "Q3_K": (2.1e-2, 2.4e-2), "IQ3_XXS": (3.3e-2, 4.1e-2),
    "IQ2_S": (6.2e-2, 6.6e-2), "Q2_K": (7.2e-2, 7.7e-2), "IQ2_XS": (9.0e-2, 9.4e-2), "IQ2_XXS": (1.2e-1, 1.2e-1),
    "IQ1_M": (2.0e-1, 2.1e-1), "IQ1_S": (2.4e-1, 2.4e-1),
}
"""Squared error / squared norm of each of `INEXACT`, in its file and stored as `REQUANTISED`, both measured on the same
matrices (docs/reference/gguf.md)."""
REQUANTISED_KLD = {"IQ3_S": (0.016, 0.023), "IQ3_XXS": (0.029, 0.036), "Q3_K": (0.020, 0.022), "Q2_K": (0.070, 0.076)}
"""KL divergences of a small trained model whose layers have such a type, dequantised and stored as `REQUANTISED`
(docs/reference/gguf.md)."""
OWN_ERROR = {
    "Q8_0": 3.0e-5, "Q6_K": 3.4e-4, "Q5_K": 1.3e-3, "Q5_1": 1.4e-3, "Q5_0": 1.7e-3, "Q4_K": 5.1e-3, "IQ4_NL": 5.6e-3,
    "Q4_1": 5.8e-3, "IQ4_XS": 6.0e-3, "Q4_0": 7.5e-3, "NVFP4": 9.1e-3, "MXFP4": 1.3e-2, "IQ3_S": 1.9e-2, "Q3_K": 2.3e-2,
    "IQ3_XXS": 3.3e-2, "IQ2_S": 6.2e-2, "Q2_K": 7.2e-2, "IQ2_XS": 9.0e-2, "IQ2_XXS": 1.2e-1, "IQ1_M": 2.0e-1,
    "IQ1_S": 2.4e-1,
}
"""Squared error of a type's weights / their squared norm, as llama.cpp quantises: on matrices of trained small models,
without an importance matrix. The loss of the file itself is not known."""


def smallest(kinds: set[str]) -> WeightType | None:
    """Return the smallest type for tensors of these types together, None if only floats would hold them all.

    It holds them without loss, or, where none of them can be held so, requantised.
    """
    if kinds <= set(INEXACT):
        return REQUANTISED
    if not kinds <= EXACT.keys():
        return None
    common = set.intersection(*(set(EXACT[kind]) for kind in kinds))
    return min(common, key=lambda stored: stored.bits_per_weight)
