"""Storage of weights: the table of types, layouts in NumPy, and the choice of codes and scales."""

from typing import TYPE_CHECKING

from ..base.lazy_import import lazily
from .table import (
    FFN_LAYOUTS,
    INPUT_COLUMNS,
    KV_TYPES,
    LINE_BYTES,
    SUPER_COLUMNS,
    TILE_ROWS,
    TYPES,
    KvType,
    StorageType,
)
from .types import GROUP_SIZES, WeightType, embedding_type, holds, requestable

if TYPE_CHECKING:
    from . import kv, layouts, levels, packed, quantise, rounding
    from .blas import one_thread
    from .input_statistics import InputStatistics

__all__ = ["FFN_LAYOUTS", "GROUP_SIZES", "INPUT_COLUMNS", "KV_TYPES", "LINE_BYTES", "SUPER_COLUMNS", "TILE_ROWS",
           "TYPES", "InputStatistics", "KvType", "StorageType", "WeightType", "embedding_type", "holds", "kv",
           "layouts", "levels", "one_thread", "packed", "quantise", "requestable", "rounding"]
__getattr__ = lazily(__name__, {**{name: name for name in ("kv", "layouts", "levels", "packed", "quantise",
                                                          "rounding")},
                                "blas": "one_thread", "input_statistics": "InputStatistics"})
"""Modules that need NumPy; they are imported on first use."""
