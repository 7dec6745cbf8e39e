"""Metadata of a GGUF file as a family reads them: keys of its architecture, sizes, and lists by layer."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedModelError
from ..hf_config.common import LAYER_TYPES
from ..hf_config.reader import ConfigReader

MAX_LAYERS = 4096


class GgufMetadata:
    """Metadata of a file about its model.

    Parameters
    ----------
    fields : mapping
        All keys of the file.
    name : str
        The architecture; its keys begin with this name.
    config : mapping
        The config.json fields that all families have: the sizes.
    tensors : mapping
        The file's tensors by name, each with a `shape`; empty if only the header was read.
    where : str
        Name of the metadata in messages.
    """

    def __init__(self, fields: Mapping[str, Any], name: str, config: Mapping[str, Any], tensors: Mapping[str, Any],
                 where: str):
        self.prefix, self.config, self.tensors = name + ".", with_head(config), tensors
        self._fields = fields
        self.reader = ConfigReader({key: value.tolist() if isinstance(value, array) else value
                                    for key, value in fields.items() if key.startswith(self.prefix)}, where)
        self._taken: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the value of a key, without the architecture's name before it; None if it is absent."""
        self._taken.add(key)
        self.reader.get(self.prefix + key)
        return plain_value(self._fields.get(self.prefix + key))

    def number(self, key: str, default: float | None, above: float = 0.0) -> Any:
        """Finite number above `above`."""
        self._taken.add(key)
        return plain_value(self.reader.number(self.prefix + key, default, above=above))

    def has_read(self, key: str) -> bool:
        """Return whether the family itself reads a key."""
        return key in self._taken

    def unsupported(self, key: str, value: Any, remedy: str) -> UnsupportedModelError:
        """Return the error for a key whose value asks for mathematics that is not here."""
        return self.reader.unsupported(self.prefix + key, value, remedy)

    def size(self, field: str) -> int:
        """Return a size that the model must have."""
        value = self.config.get(field)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"The metadata lack {field}, which the model needs; download the file again.")
        return value

    def layers(self) -> int:
        """Return how many layers there are, bounded before something is made for each."""
        layers = self.size("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise UnsupportedModelError(f"The metadata say that there are {layers} layers, but edgeinfer takes at most "
                                        f"{MAX_LAYERS}; download the file again.")
        return layers

    def layers_without_drafts(self) -> int:
        """Return how many layers there are before those that draft, which a file counts among them."""
        layers, drafts = self.layers(), self.get("nextn_predict_layers") or 0
        if not isinstance(drafts, int) or not 0 <= drafts < layers:
            raise self.unsupported("nextn_predict_layers", drafts, f"it must be below the {layers} layers")
        return layers - drafts

    def by_layer(self, value: Any, what: str) -> list[int]:
        """Return numbers, or flags, per layer; a file may have one for all."""
        layers = self.layers()
        found = list(value) if isinstance(value, list | bytes) else [value] * layers
        if len(found) != layers or not all(isinstance(item, int) and item >= 0 for item in found):
            raise UnsupportedModelError(f"The metadata have {value!r:.60} as {what}, which the model needs for each of "
                                        f"{layers} layers; download the file again.")
        return found

    def layer_types(self, period: int) -> list[str]:
        """Return which layers have a window: a flag for each, or every one but the last of a period."""
        layers, said = self.layers(), self.get("attention.sliding_window_pattern")
        period = said if type(said) is int and said > 0 else period
        slides = [(i + 1) % period != 0 for i in range(layers)]
        if said is not None and type(said) is not int:
            slides = [bool(flag) for flag in self.by_layer(said, "attention.sliding_window_pattern")]
        return [LAYER_TYPES[slide] for slide in slides]

    def scaling(self) -> tuple[str, float]:
        """Return how the rotation is stretched, and how far; a factor without a type is linear, as in llama.cpp."""
        r, named, older = self.reader, f"{self.prefix}rope.scaling.factor", f"{self.prefix}rope.scale_linear"
        r.get(older)
        name = older if r.has(older) and not r.has(named) else named
        factor = r.number(name, 0.0, above=-1.0)
        key = f"{self.prefix}rope.scaling.type"
        kind = r.choice(key, r.get(key) or ("none" if factor in (0, 1) else "linear"), ("none", "linear", "yarn"))
        return kind, 1.0 if kind == "none" else r.number(name)


def plain_value(value: Any) -> Any:
    """Return one number for a list of equal ones by layer, and the shortest decimal that is a float32."""
    if isinstance(value, array) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, float) and math.isfinite(value) and abs(value) < 1e38:
        for digits in range(1, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
    return value


def with_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the width of a head."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    known = isinstance(heads, int) and isinstance(width, int) and heads > 0
    return {**({"head_dim": width // heads} if known else {}), **config}  # type: ignore[operator]
