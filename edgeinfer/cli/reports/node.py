"""A node of a cluster as it describes itself: its processor, instruction set, memory and predicted speed."""

from __future__ import annotations

from typing import Any

from ...base.units import format_size
from ..output import speed

CTX, PROMPT = 4096, 512
"""Most context and prompt of the prediction."""


def node_object(model: str | None) -> dict[str, Any]:
    """Return the description of this machine, with the predicted speed of a model if there is a profile."""
    from edgeinfer.devices import local_profile, machine_name
    from edgeinfer.kernels import choose
    from edgeinfer.memory_planner import available_bytes, default_threads

    from ... import __version__

    profile = local_profile()
    found: dict[str, Any] = {
        "machine": machine_name(), "version": __version__, "isa": choose().name, "threads": default_threads(),
        "free_bytes": available_bytes(), "probed": profile is not None, "decode_tok_per_s": None,
        "prefill_tok_per_s": None}
    if model is not None and profile is not None:
        from ...config import RuntimeConfig
        from ...models.describe import describe
        from .estimate_object import estimate_object

        described = describe(model, profile=profile)
        ctx = min(described.config.max_position_embeddings, CTX)
        out = estimate_object(described, profile, ctx, min(PROMPT, ctx), "int8", (1.0, None), RuntimeConfig())
        found |= {name: out[name] for name in ("decode_tok_per_s", "prefill_tok_per_s")}
    return found


def node_row(one: dict[str, Any], model: str | None) -> tuple[str, ...]:
    """Return the row of a node in the table."""
    if one["error"] is not None:
        return one["address"], f"cannot be asked: {one['error']}", "", "", ""
    predicted = "" if model is None else "not probed" if not one["probed"] else \
        f"{speed(one['decode_tok_per_s'])} tok/s, {speed(one['prefill_tok_per_s'])} prompt tok/s"
    return one["address"], one["machine"], one["isa"], format_size(one["free_bytes"]), predicted
