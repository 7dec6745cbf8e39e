"""The KV pool of a server: its size, and how many sequences of which length it holds at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ..output import folded, table

if TYPE_CHECKING:
    from edgeinfer.memory_planner import MemoryPlan

FIELD = ("with --serve, else null: `kv_bytes` of the KV pool, `kv_tokens` that it holds together, of which layers with "
         "a window keep `window_tokens` (null where all layers keep all), `max_sequences`, and `fits`: per length in "
         "`tokens` the `sequences` that fit at once")
LENGTHS = (256, 1024, 4096)
"""Tokens of prompt and answer together, beside a whole context."""


def serving_object(plan: MemoryPlan, block_tokens: int) -> dict[str, Any]:
    """Return the JSON object of a plan whose blocks have this many tokens."""
    ctx = plan.request.ctx
    lengths = (*(tokens for tokens in LENGTHS if tokens < ctx), ctx)
    return {
        "kv_bytes": plan.region("kv").nbytes, "kv_tokens": plan.kv_blocks * block_tokens,
        "window_tokens": plan.windowed.blocks * block_tokens if plan.windowed else None,
        "max_sequences": plan.request.sequences,
        "fits": [{"tokens": tokens, "sequences": plan.sequences_of(tokens, block_tokens)} for tokens in lengths],
    }


def serving_lines(found: dict[str, Any]) -> Iterator[str]:
    """Return the lines for people."""
    kept = "" if found["window_tokens"] is None else f", {found['window_tokens']} in layers with a window"
    yield from folded(f"the KV pool of {format_size(found['kv_bytes'])} holds {found['kv_tokens']} tokens{kept}; these "
                      "fit at once:", "serving  ")
    rows = ((str(row["sequences"]), "sequences of", str(row["tokens"]), "tokens") for row in found["fits"])
    yield from (" " * 9 + line for line in table(rows, right=[0, 2]))
