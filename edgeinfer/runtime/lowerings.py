"""All lowerings that the package brings: importing this registers them."""

from __future__ import annotations

from . import lowering_experts
from .lowering import Lowering, lower, rows

__all__ = ["Lowering", "lower", "lowering_experts", "rows"]
