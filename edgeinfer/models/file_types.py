"""Storage of a model's weights in a GGUF file of a given type, without the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..graph import TypeOf, Weight, requested_types
from ..quant import WeightType

if TYPE_CHECKING:
    from edgeinfer.converters import Checkpoint, ChosenTypes

_PLAIN = {"Q4_0": ("q4", 32), "Q8_0": ("int8", 32)}
_NESTED = {"Q4_K": ("q4k", 32), "Q5_K": ("q5k", 32), "Q6_K": ("q6", 16), "IQ4_XS": ("iq4k", 32)}
_NAMED = ("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_XS")
BLOCK = 256
_NARROW = {"q4k": ("q5", 32), "q5k": ("q5m", 32), "q6": ("int8", 32), "iq4k": ("iq4", 32)}
"""Types of rows that are no whole blocks of 256 columns, by the type that they replace."""
ENDS = ("embedding", "head", "inputs")
_LARGER = WeightType.of("q6", 16)
"""Type of the head, and in files that end in M of half of the matrices that leave the FFN."""


def types_of_file(file_type: str, layers: int, tied: bool, values: bool = False) -> TypeOf:
    """Return the types of the weights of such a file, as edgeinfer stores them.

    Rows that are no whole blocks of 256 columns have another type, as there. llama.cpp's rules for single models
    (Falcon, Llama 70B, 8 experts) are left out.

    Parameters
    ----------
    file_type : str
        One of `FILE_TYPES` or `COARSE_TYPES`; the matrices of the latter are held in q4, groups of 32.
    layers : int
    tied : bool
        Whether the embedding is the head.
    values : bool
        Whether V, too, has the larger type in the layers of the larger type, as a matrix of its own; it is a few
        thousandths of the bytes.
    """
    whole = _of_whole_blocks(file_type, layers, tied, values)

    def type_of(weight: Weight) -> WeightType:
        found = whole(weight)
        narrow = found.dtype in _NARROW and weight.shape and weight.shape[-1] % BLOCK  # of an FFN as such: none
        return WeightType.of(*_NARROW[found.dtype]) if narrow else found

    return type_of


def mixed_types(name: str, checkpoint: Checkpoint) -> ChosenTypes:
    """Choose the types of a file of `MIXED_TYPES` for a checkpoint that is converted."""
    from edgeinfer.converters import ChosenTypes

    config = checkpoint.config
    own = checkpoint.graph(types_of_file(name.upper(), config.num_hidden_layers, config.tie_word_embeddings,
                                         values=True))
    types: Mapping[str, WeightType] = {weight.name: own.types[weight.name] for weight in own.weights
                                       if weight.kind not in ("vector", "router")}
    return ChosenTypes(types, f"--weights {name}")


def _of_whole_blocks(file_type: str, layers: int, tied: bool, values: bool) -> TypeOf:
    if file_type in _PLAIN or file_type not in _NAMED:
        name, group = _PLAIN.get(file_type, _PLAIN["Q4_0"])
        plain = requested_types(name, group)
        kind = WeightType.of(name, group)
        return lambda weight: plain(weight) if name == "int8" or weight.kind not in ENDS else _end(weight, kind, tied)
    kind = WeightType.of(*_NESTED[file_type.removesuffix("_M").removesuffix("_S")])
    others = requested_types("int8")

    def type_of(weight: Weight) -> WeightType:
        if weight.kind in ENDS:
            return _end(weight, kind, tied)
        if file_type.endswith("_M") and _in_larger(weight, layers, "down"):
            return _LARGER
        if values and file_type.endswith("_M") and (part := _part_of_qkv(weight, layers)) is not None:
            return others(weight) if part == 1 else _LARGER if part else kind
        return kind if weight.kind in ("matrix", "ffn", "experts", "rows") else others(weight)

    return type_of


def _end(weight: Weight, kind: WeightType, tied: bool) -> WeightType:
    """Return the type of the embedding, which is that of the matrices, or of the head."""
    return _LARGER if tied or weight.kind == "head" else kind


def _part_of_qkv(weight: Weight, layers: int) -> int | None:
    """Return the number of a source of Q, K and V, in a layer whose V has the larger type; else None."""
    name, _, part = weight.name.rpartition(".")
    return int(part) if part.isdigit() and _in_larger(Weight(name, (), "matrix"), layers, "qkv") else None


def _in_larger(weight: Weight, layers: int, kind: str) -> bool:
    """Return whether a matrix is one of those that llama.cpp stores in more bits: at both ends, and each third
    between."""
    parts = weight.name.split(".")
    if len(parts) < 3 or not parts[1].isdigit() or kind not in parts[-1]:
        return False
    layer, eighth = int(parts[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
