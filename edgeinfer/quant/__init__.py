"""Storage of weights: the table of types, layouts in NumPy, and the choice of codes and scales."""

from importlib import import_module
from typing import TYPE_CHECKING

from .table import (
    FFN_LAYOUTS,
    INPUT_COLUMNS,
    KV_TYPES,
    LAYOUTS,
    LINE_BYTES,
    SUPER_COLUMNS,
    TILE_ROWS,
    TYPES,
    KvType,
    StorageType,
)
from .types import GROUP_SIZES, WeightType, embedding_type, holds, requestable

if TYPE_CHECKING:
    from . import kv, layouts, packed, quantise

__all__ = ["FFN_LAYOUTS", "GROUP_SIZES", "INPUT_COLUMNS", "KV_TYPES", "LAYOUTS", "LINE_BYTES", "SUPER_COLUMNS",
           "TILE_ROWS", "TYPES", "KvType", "StorageType", "WeightType", "embedding_type", "holds", "kv", "layouts",
           "packed", "quantise", "requestable"]


def __getattr__(name: str) -> object:
    """Load a module on first use: they need NumPy."""
    if name not in ("kv", "layouts", "packed", "quantise"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
