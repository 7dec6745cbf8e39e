"""How weights are stored: the table of types, layouts in NumPy, and the choice of codes and scales."""

from importlib import import_module
from typing import TYPE_CHECKING

from .types import (
    FFN_LAYOUTS,
    GROUP_SIZES,
    KV_TYPES,
    LAYOUTS,
    LINE_BYTES,
    SUPER_COLUMNS,
    TILE_ROWS,
    TYPES,
    KvType,
    StorageType,
    WeightType,
    embedding_type,
    holds,
    requestable,
)

if TYPE_CHECKING:
    from . import layouts, packed, quantise

__all__ = ["FFN_LAYOUTS", "GROUP_SIZES", "KV_TYPES", "LAYOUTS", "LINE_BYTES", "SUPER_COLUMNS", "TILE_ROWS", "TYPES",
           "KvType", "StorageType", "WeightType", "embedding_type", "holds", "layouts", "packed", "quantise",
           "requestable"]


def __getattr__(name: str) -> object:
    """Load a module on first use: both need NumPy."""
    if name not in ("layouts", "packed", "quantise"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
