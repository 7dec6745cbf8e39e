"""`edgeinfer plan --compare`: a model with every type of weights that can be made or downloaded, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ...base.units import format_size
from ...errors import UnsupportedModelError, UsageError
from ...models import sizes
from ...quality.known import loss_words
from ..lengths import beyond
from ..output import folded, print_table, speed
from .recommendation import PROMPT, held, one

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ...models.description import ModelDescription
    from ...models.sizes import Sized

STORED = "as it is"
"""Type of a file or bundle that is compared with others."""
OF_ROW = ("total_bytes", "low", "high", "decode_tok_per_s", "ttft_ms", "kld", "program", "unit")
"""Fields that rows have in common with recommendations."""
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
    models = _described(own, length, devices.served(device) is not None)
    return {**_object(name, None, device, length, budget, models),
            "quantised": bool(own.file_types), "bundle": own.bundle is not None}


def _described(own: ModelDescription, ctx: int, card: bool) -> Iterator[Sized]:
    """Yield a model as it is stored, and with the types that it can be converted to, for NVIDIA's cards as well."""
    from ...models.describe import describe

    if own.bundle or own.file_types:
        yield _sized(own, STORED, ctx, card)
    for kind in sizes.MADE:
        with suppress(UnsupportedModelError, UsageError):  # types that its weights cannot be stored in
            found = describe(own.name, kind)
            if not own.file_types or found.weight_bytes < own.weight_bytes:
                yield _sized(found, kind, ctx, card)


def _sized(model: ModelDescription, kind: str, ctx: int, card: bool) -> Sized:
    from edgeinfer.memory_planner import Planner, to_request

    from ...config import RuntimeConfig

    planner = sizes.card_planner(model) if card else None
    plan = Planner(model.graph, model.weight_bytes).plan(to_request(RuntimeConfig(ctx=ctx, kv=sizes.KV, threads=4)))
    return sizes.of_description(model, kind, plan.total_bytes, ctx, planner)


def _object(name: str, shape: str | None, device: DeviceProfile, ctx: int, budget: int | None, models: Iterator[Sized]
            ) -> dict[str, Any]:
    rows, cards, notes = [], 0, list[str]()
    for model in models:
        notes = beyond(ctx, model.longest)
        where = held(device, model, ctx, budget)
        found = one(model, ctx, where)
        cards += where.on_card
        made = model.ternary or model.kind in sizes.MADE
        source = MAKE if made else EITHER if model.kind in sizes.EITHER else "" if model.kind == STORED else FILE
        rows.append({
            "weights": model.kind, "made": made, "from": source,
            "file_bytes": model.file_bytes, "fits": where.fits, **{key: found[key] for key in OF_ROW},
        })
    if exact := any(row["weights"] == "q2" for row in rows):
        rows.sort(key=lambda row: row["total_bytes"])
    return {"model": name, "shape": shape, "device": device.name, "device_title": device.titled, "ctx": ctx,
            "prompt": min(PROMPT, ctx), "budget_bytes": device.usable_bytes if cards or budget is None else budget,
            "process_budget_bytes": budget if cards else None, "quantised": False, "bundle": False, "exact": exact,
            "types": rows, "notes": notes}


def verdict_of(out: dict[str, Any]) -> str:
    """Return the answer in one sentence."""
    rows = out["types"]
    fitting = [row for row in rows if row["fits"] and row["weights"] != "f16"] or [row for row in rows if row["fits"]]
    where, there, limit = out["device_title"], format_size(out["budget_bytes"]), out["process_budget_bytes"]
    if not fitting:
        beside = f" and {format_size(limit)} for the process beside it" if limit else ""
        return (f"No type fits {where} ({there}{beside}) with a context of {out['ctx']}; a smaller --ctx or model "
                "does.")
    top = fitting[0] if out["quantised"] else next((row for row in fitting if row["weights"] != STORED), fitting[0])
    what = f"The file as it is fits {where}, and nothing is more exact" if top["weights"] == STORED else \
        f"{top['weights']} holds the model's three values exactly, as larger types do, and fits {where}" \
        if out["exact"] else f"{top['weights']} is the most exact that fits {where}"
    return (f"{what}: {format_size(top['total_bytes'])} of {there}, {speed(top['decode_tok_per_s'])} tokens/s "
            f"({top['program']} on the {top['unit'].upper()}).")


def table_of(out: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table with its heading."""
    table: list[tuple[str, ...]] = [
        ("type", "from", "file", "memory", "fits", "tokens/s", "80 % band", "TTFT", "KLD")]
    for row in out["types"]:
        wait = "" if row["ttft_ms"] is None else f"{row['ttft_ms'] / 1000:.1f} s"
        table.append((row["weights"], row["from"], format_size(row["file_bytes"]),
                      format_size(row["total_bytes"]), "yes" if row["fits"] else "no", speed(row["decode_tok_per_s"]),
                      f"{speed(row['low'])}-{speed(row['high'])}", wait,
                      loss_words(row["weights"]) if row["kld"] else ""))
    return table


def remarks_of(out: dict[str, Any]) -> list[str]:
    """Return the sentences below the table."""
    own = " Other types than the bundle's own are made from its checkpoint." if out["bundle"] else ""
    return [f"{out['ctx']} tokens of context, half of it filled; TTFT is of a prompt of {out['prompt']}; speeds are as "
            "if all weights were in memory. KLD was measured on models of 5 million parameters, of some types on the "
            "layers alone; larger models lose less." + own, *out["notes"]]


def print_comparison(out: dict[str, Any]) -> None:
    """Print the table, the answer first."""
    print("\n".join(folded(verdict_of(out))) + "\n")
    print_table(table_of(out), right=[2, 3, 5, 7])
    print()
    for line in remarks_of(out):
        print("\n".join(folded(line)))
