"""`edgeinfer plan --compare`: a model with every type of weights that can be made or downloaded, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...errors import UnsupportedModelError, UsageError
from ...models import sizes
from ...quality.known import LOSSES, loss_words
from ..lengths import beyond
from ..output import folded, print_table, speed
from .recommendation import PROMPT, one

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ...models.description import ModelDescription
    from ...models.sizes import Sized

STORED = "as it is"
"""Type of a file or bundle that is compared with others."""
FILE, MAKE, EITHER = "GGUF", "convert", "either"


def compared(name: str, model: str, device: DeviceProfile, ctx: int, budget: int | None = None,
             kinds: tuple[str, ...] = sizes.COMPARED) -> dict[str, Any]:
    """Return the JSON object of a built-in shape: a row for each type, whether it fits or not.

    Parameters
    ----------
    name : str
        As it was given.
    model : str
        A built-in shape.
    device : DeviceProfile
    ctx : int
    budget : int, optional
        By default the memory of the device.
    kinds : tuple of str
        Types of weights; a model that was trained with three values has those that hold them instead.
    """
    models = (sizes.sized(model, kind) for kind in sizes.types_of(model, kinds))
    return _object(name, model, device, ctx, budget, models)


def compared_of(name: str, device: DeviceProfile, ctx: int | None, budget: int | None = None) -> dict[str, Any]:
    """Return the JSON object of a checkpoint, GGUF file, bundle or model of the hub, with the types it can have.

    Parameters as those of `compared`. Quantised files are compared as they are and with smaller types alone: a larger
    one brings back nothing.
    """
    from ...models.describe import describe

    own = describe(name)
    length = ctx or min(own.config.max_position_embeddings, sizes.CTX)
    return {**_object(name, None, device, length, budget, _described(own, length)),
            "quantised": bool(own.file_types), "bundle": own.bundle is not None}


def _described(own: ModelDescription, ctx: int) -> Iterator[Sized]:
    """Yield a model as it is stored, and with the types that it can be converted to."""
    from ...models.describe import describe

    if own.bundle or own.file_types:
        yield _sized(own, STORED, ctx)
    for kind in sizes.MADE:
        with suppress(UnsupportedModelError, UsageError):  # types that its weights cannot be stored in
            found = describe(own.name, kind)
            if not own.file_types or found.weight_bytes < own.weight_bytes:
                yield _sized(found, kind, ctx)


def _sized(model: ModelDescription, kind: str, ctx: int) -> Sized:
    from edgeinfer.memory_planner import Planner, to_request

    from ...config import RuntimeConfig

    plan = Planner(model.graph, model.weight_bytes).plan(to_request(RuntimeConfig(ctx=ctx, kv=sizes.KV, threads=4)))
    return sizes.of_description(model, kind, plan.total_bytes, ctx)


def _object(name: str, shape: str | None, device: DeviceProfile, ctx: int, budget: int | None, models: Iterator[Sized]
            ) -> dict[str, Any]:
    room = device.usable_bytes if budget is None else budget
    endless = replace(device, memory_bytes=1 << 49, memory_gib=())
    rows, notes = [], list[str]()
    for model in models:
        notes = beyond(ctx, model.longest)
        found = one(endless, model, ctx)
        assert found is not None
        loss = None if model.ternary else LOSSES.get(model.kind)
        made = model.ternary or model.kind in sizes.MADE
        source = MAKE if made else EITHER if model.kind in sizes.EITHER else "" if model.kind == STORED else FILE
        rows.append({
            "weights": model.kind, "made": made, "from": source,
            "file_bytes": model.file_bytes, "total_bytes": found["total_bytes"], "fits": found["total_bytes"] <= room,
            "low": found["low"], "high": found["high"], "decode_tok_per_s": found["decode_tok_per_s"],
            "ttft_ms": found["ttft_ms"], "kld": None if loss is None else list(loss), "program": found["program"],
            "unit": found["unit"],
        })
    return {"model": name, "shape": shape, "device": device.name, "device_title": device.titled, "ctx": ctx,
            "prompt": min(PROMPT, ctx), "budget_bytes": room, "quantised": False, "bundle": False, "types": rows,
            "notes": notes}


def print_comparison(out: dict[str, Any]) -> None:
    """Print the table, the answer first."""
    rows = out["types"]
    fitting = [row for row in rows if row["fits"] and row["weights"] != "f16"] or [row for row in rows if row["fits"]]
    where = f"{out['device_title']}, {format_size(out['budget_bytes'])}"
    if fitting:
        top = fitting[0] if out["quantised"] else next(
            (row for row in fitting if row["weights"] != STORED), fitting[0])
        what = f"The file as it is fits {where}, and nothing is more exact" if top["weights"] == STORED else \
            f"q2 holds the model's three values exactly, as larger types do, and fits {where}" \
            if top["weights"] == "q2" else f"{top['weights']} is the most exact that fits {where}"
        said = (f"{what}: {format_size(top['total_bytes'])}, {speed(top['decode_tok_per_s'])} tokens/s "
                f"({top['program']} on the {top['unit'].upper()}).")
    else:
        said = f"No type fits {where} with a context of {out['ctx']}; a smaller --ctx or model does."
    print("\n".join(folded(said)) + "\n")
    table = [("type", "from", "file", "memory", "fits", "tokens/s", "80 % band", "TTFT", "KLD")]
    for row in rows:
        wait = "" if row["ttft_ms"] is None else f"{row['ttft_ms'] / 1000:.1f} s"
        table.append((row["weights"], row["from"], format_size(row["file_bytes"]),
                      format_size(row["total_bytes"]), "yes" if row["fits"] else "no", speed(row["decode_tok_per_s"]),
                      f"{speed(row['low'])}-{speed(row['high'])}", wait,
                      loss_words(row["weights"]) if row["kld"] else ""))
    print_table(table, right=[2, 3, 5, 7])
    own = " Other types than the bundle's own are made from its checkpoint." if out["bundle"] else ""
    print("\n" + "\n".join(folded(
        f"{out['ctx']} tokens of context, half of it filled; TTFT is of a prompt of {out['prompt']}; speeds are as if "
        "all weights were in memory. KLD was measured on models of 5 million parameters, of some types on the "
        "layers alone; larger models lose less." + own)))
    for line in out["notes"]:
        print("\n".join(folded(line)))
