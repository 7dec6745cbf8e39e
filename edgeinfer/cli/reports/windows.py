"""Report lines on layers with a window, which keep only the K and V inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...base.units import format_size

if TYPE_CHECKING:
    from edgeinfer.memory_planner import MemoryPlan

FIELD = ("of layers that keep the K and V in their window: `layers` of `of`, their `window`, the last `positions` that "
         "each keeps of a context, so that one takes `kv_bytes` of K and V instead of `whole_bytes`, and all that as "
         "`said`; null where all layers keep all")


def windows_object(plan: MemoryPlan) -> dict[str, Any] | None:
    """Return the JSON object, or None if all layers keep whole contexts."""
    if plan.windowed is None:
        return None
    layers, of, ctx = len(plan.windowed.layers), len(plan.kv_layers), plan.request.ctx
    positions, (kept, whole) = min(plan.windowed.positions, ctx), plan.context_kv_bytes
    which, others = (f"{layers} of {of}", ", the others all") if layers < of else (f"all {of}", "")
    said = (f"{which} layers see {plan.windowed.window} positions and keep the last {positions} of {ctx}{others}: KV "
            f"of a context takes {format_size(kept)} instead of {format_size(whole)}")
    return {"layers": layers, "of": of, "window": plan.windowed.window, "positions": positions, "kv_bytes": kept,
            "whole_bytes": whole, "said": said}
