"""Storage of a model's weights in a GGUF file of a given type, without the file."""

from __future__ import annotations

from ..graph import TypeOf, Weight, requested_types
from ..quant import WeightType

_PLAIN = {"Q4_0": ("q4", 32), "Q8_0": ("int8", 32)}
_NESTED = {"Q4_K": ("q4k", 32), "Q5_K": ("q5k", 32), "Q6_K": ("q6", 16), "IQ4_XS": ("iq4k", 32)}
BLOCK = 256
_NARROW = {"q4k": ("q5", 32), "q5k": ("q5m", 32), "q6": ("int8", 32), "iq4k": ("iq4", 32)}
"""Types of rows that are no whole blocks of 256 columns, by the type that they replace."""
ENDS = ("embedding", "head", "inputs")
_LARGER = WeightType.of("q6", 16)
"""Type of the head, and in files that end in M of half of the matrices that leave the FFN."""


def types_of_file(file_type: str, layers: int, tied: bool) -> TypeOf:
    """Return the types of the weights of such a file, as edgeinfer stores them.

    llama.cpp stores V, too, in the larger type in some layers; it is a few thousandths of the bytes and left out. Rows
    that are no whole blocks of 256 columns have another type, as there.

    Parameters
    ----------
    file_type : str
        One of `FILE_TYPES`.
    layers : int
    tied : bool
        Whether the embedding is the head.
    """
    whole = _of_whole_blocks(file_type, layers, tied)

    def type_of(weight: Weight) -> WeightType:
        found = whole(weight)
        narrow = found.dtype in _NARROW and weight.shape and weight.shape[-1] % BLOCK  # of an FFN as such: none
        return WeightType.of(*_NARROW[found.dtype]) if narrow else found

    return type_of


def _of_whole_blocks(file_type: str, layers: int, tied: bool) -> TypeOf:
    if file_type in _PLAIN:
        name, group = _PLAIN[file_type]
        plain = requested_types(name, group)
        kind = WeightType.of(name, group)
        return lambda weight: plain(weight) if name == "int8" or weight.kind not in ENDS else _end(weight, kind, tied)
    kind = WeightType.of(*_NESTED[file_type.removesuffix("_M").removesuffix("_S")])
    others = requested_types("int8")

    def type_of(weight: Weight) -> WeightType:
        if weight.kind in ENDS:
            return _end(weight, kind, tied)
        if file_type.endswith("_M") and _in_larger(weight, layers):
            return _LARGER
        return kind if weight.kind in ("matrix", "ffn", "experts", "rows") else others(weight)

    return type_of


def _end(weight: Weight, kind: WeightType, tied: bool) -> WeightType:
    """Return the type of the embedding, which is that of the matrices, or of the head."""
    return _LARGER if tied or weight.kind == "head" else kind


def _in_larger(weight: Weight, layers: int) -> bool:
    """Whether a matrix is one of those that llama.cpp stores in more bits: at both ends, and each third between."""
    parts = weight.name.split(".")
    if len(parts) < 3 or not parts[1].isdigit() or "down" not in parts[-1]:
        return False
    layer, eighth = int(parts[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
