"""Sizes of lowered models as a table has them, so that runs on cards are planned without lowering.

The table is edgeinfer/models/shape_sizes.json, of the built-in shapes by type of their weights.
"""

from __future__ import annotations

from typing import Any

from edgeinfer.config import CUDA, DEFAULT_DRAFT_TOKENS, SLOTS, Recipe, RuntimeConfig
from edgeinfer.graph import ModelConfig
from edgeinfer.memory_planner import to_request

from .devices import PROVIDERS
from .planning import DevicePlanner
from .sizes import Matmul, Sizes

OF_SHAPE = ("operations", "head_operations", "kv_bytes", "window_kv_bytes", "kv_width", "widest_kv", "copied_kv",
            "state_bytes", "largest_state")
"""Fields of the sizes that do not depend on the type of the weights."""
OF_TYPE = ("data", "largest", "read")
"""Those that do; after them comes the matmul whose matrix is written out, if there is one."""


def known_config(planner: DevicePlanner, ctx: int, budget: int | None = None) -> RuntimeConfig:
    """Return the settings that a run on a card has by default."""
    return RuntimeConfig(ctx=ctx, kv=planner.provider.kv[0], threads=1, draft_tokens=DEFAULT_DRAFT_TOKENS,
                         budget_bytes=budget, recipe=Recipe(()))


def known_of(planner: DevicePlanner, ctx: int) -> tuple[dict[str, float], list[float]]:
    """Return what a table has of a lowered model: of the shape, and of the type of its weights.

    Of its matmuls it has the one whose matrix takes most of the arena, for contexts of more than a few tokens.
    """
    request = to_request(known_config(planner, ctx))
    sizes = planner.lower(request)
    written, matmul = planner.largest_written_out(request)
    return ({name: getattr(sizes, name) for name in OF_SHAPE},
            [*(getattr(sizes, name) for name in OF_TYPE), *(matmul if written and matmul else ())])


def known_planner(config: ModelConfig, shape: dict[str, Any], stored: list[Any]) -> DevicePlanner:
    """Return the planner of one sequence on a card, from what a table has of the model."""
    of_type, matmul = stored[:len(OF_TYPE)], stored[len(OF_TYPE):]
    sizes = Sizes(**dict(zip(OF_TYPE, of_type, strict=True)), **{name: shape[name] for name in OF_SHAPE},
                  matmuls=frozenset([Matmul(*matmul)] if matmul else ()))
    return DevicePlanner(config, PROVIDERS[CUDA], SLOTS, lambda flavour: sizes)
