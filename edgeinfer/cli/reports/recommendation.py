"""Reports of `edgeinfer recommend`: models for a device, and devices for a speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.units import format_size
from ...base.validation import number
from ...models import sizes
from ...models.uses import RAG_CTX, called
from ...quality.known import LOSSES, loss_words
from ..output import folded, print_table, speed

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic

    from ...models.sizes import Sized

DEFAULT_CTX, DEFAULT_SPEED = 4096, 5.0
SPEED = number(lambda speed: 0 < speed < float("inf"), "a finite number above 0")
"""Rule of the least tokens per second."""
PROMPT = 2000
"""Tokens of the prompt whose first word is timed."""
MAX_ROWS = 12


class Held(NamedTuple):
    """A model with all weights in the memory of a device."""

    device: DeviceProfile
    """As the program uses it that runs the model there."""
    traffic: Traffic
    total_bytes: int
    """Memory of the run; of one on a card the card's."""
    fits: bool
    on_card: bool
    """True if CUDA runs it there: the limit of its memory is the card's."""


def held(device: DeviceProfile, model: Sized, ctx: int, budget: int | None = None) -> Held:
    """Return the memory that a model takes on a device; the budget, if there is one, limits the process."""
    from edgeinfer.devices import served

    if model.on_card and (card := served(device)):
        run = model.on_card(ctx, budget)
        return Held(card, run.traffic, run.plan.device_bytes, run.fits(card), True)
    total = round(model.run_bytes(ctx))
    return Held(device, model.traffic, total, total <= (budget or device.usable_bytes), False)


def one(model: Sized, ctx: int, found: Held) -> dict[str, Any]:
    """Return the memory and the speed of a model on a device that holds it, or would with more memory."""
    from edgeinfer.devices import estimate

    device, total = found.device, found.total_bytes
    speeds = estimate(device, found.traffic, ctx // 2, min(PROMPT, ctx))
    loss = None if model.ternary else LOSSES.get(model.kind)
    return {
        "model": model.name, "weights": model.kind, "parameters": model.parameters, "ctx": ctx,
        "total_bytes": total, "decode_tok_per_s": speeds.decode_tok_per_s, "low": speeds.low, "high": speeds.high,
        "prompt": speeds.prompt, "ttft_ms": speeds.ttft_ms, "kld": None if loss is None else list(loss),
        "program": speeds.program, "unit": speeds.unit, "device": device.name, "memory_bytes": device.memory_bytes,
    }


def best(device: DeviceProfile, name: str, ctx: int, min_speed: float) -> dict[str, Any] | None:
    """Return the most exact type of a model that fits a device and is fast enough there; None if none is.

    f16 is left out: int8 loses nothing that was measured, at half the bytes. Of a model that was trained with three
    values all types are exact, and the smallest on the device comes first.
    """
    models = [sizes.sized(name, kind) for kind in sizes.types_of(name, sizes.TYPES) if kind != "f16"]
    if models[0].ternary:
        models.sort(key=lambda model: held(device, model, ctx).total_bytes)
    for model in models:
        if not (found := held(device, model, ctx)).fits:
            continue
        if (row := one(model, ctx, found))["decode_tok_per_s"] >= min_speed:
            return row
    return None


def models_for(device: DeviceProfile, ctx: int, min_speed: float, use: str) -> Iterator[dict[str, Any]]:
    """Yield the models that fit a device and are fast enough there, the largest first."""
    rows = ((name, called(name, use)) for name in sizes.names())
    known = [(name, title, sizes.sized(name, "q4")) for name, title in rows if title]
    for name, title, model in sorted(known, key=lambda row: -row[2].parameters):
        if model.longest >= max(ctx, RAG_CTX if use == "rag" else 0) and (found := best(device, name, ctx, min_speed)):
            yield {**found, "called": title}


def smallest(devices: Iterable[DeviceProfile], name: str, ctx: int, min_speed: float) -> list[dict[str, Any]]:
    """Return the devices that run a model fast enough, each with its smallest memory, by the memory."""
    rows = []
    for device in devices:
        versions = [replace(device, memory_bytes=gib << 30) for gib in sorted(device.memory_gib)] or [device]
        if (found := best(versions[-1], name, ctx, min_speed)) is None:
            continue  # less memory holds no type that more does not
        for version in versions[:-1]:
            if less := best(version, name, ctx, min_speed):
                found = less
                break
        rows.append({**found, "title": device.title})
    return sorted(rows, key=lambda row: (row["memory_bytes"], -row["decode_tok_per_s"]))


def print_models(out: dict[str, Any]) -> None:
    """Print the models for one device, the answer first."""
    rows = out["models"]
    asked = f"{out['ctx']} tokens of context, {out['min_speed']:g} tokens/s or more"
    if not rows:
        print("\n".join(folded(f"Nothing for {out['for']} fits {out['device_title']} with {asked}; a smaller --ctx or "
                               "--min-speed admits more.")))
        return
    first = rows[0]
    print("\n".join(folded(
        f"{first['called']} as {first['weights']}: {speed(first['decode_tok_per_s'])} tokens/s in "
        f"{format_size(first['total_bytes'])}, the largest for {out['for']} on {out['device_title']} "
        f"({first['program']} on the {first['unit'].upper()}).")) + "\n")
    table = [("model", "type", "memory", "tokens/s", "80 % band", "TTFT", "KLD")]
    for row in rows:
        wait = "" if row["ttft_ms"] is None else f"{row['ttft_ms'] / 1000:.1f} s"
        table.append((row["called"][:24], row["weights"], format_size(row["total_bytes"]),
                      speed(row["decode_tok_per_s"]), f"{speed(row['low'])}-{speed(row['high'])}", wait,
                      loss_words(row["weights"]) if row["kld"] else ""))
    print_table(table, right=[2, 3, 5])
    print("\n" + "\n".join(folded(
        f"With {asked}, half of it filled; TTFT is of a prompt of {min(PROMPT, out['ctx'])}. KLD was "
        "measured on models of 5 million parameters; larger ones lose less.")))


def print_devices(out: dict[str, Any]) -> None:
    """Print the devices that are fast enough, those with the least memory first."""
    rows, what = out["devices"], out["model"] or f"a model for {out['for']}"
    asked = f"{out['ctx']} tokens of context at {out['min_speed']:g} tokens/s or more"
    if not rows:
        print("\n".join(folded(f"No known device runs {what} with {asked}; a smaller --ctx or --min-speed admits "
                               "more.")))
        return
    first = rows[0]
    print("\n".join(folded(
        f"The least memory is {first['memory_bytes'] / 2**30:g} GB: {first['title']} runs {first['model']} as "
        f"{first['weights']} at {speed(first['decode_tok_per_s'])} tokens/s ({first['program']} on the "
        f"{first['unit'].upper()}).")) + "\n")
    table = [("device", "GB", "model", "type", "tokens/s", "80 % band")]
    for row in rows[: 2 * MAX_ROWS]:
        table.append((row["device"], f"{row['memory_bytes'] / 2**30:g}", row["model"], row["weights"],
                      speed(row["decode_tok_per_s"]), f"{speed(row['low'])}-{speed(row['high'])}"))
    print_table(table, right=[1, 4])
    more = f"; {len(rows) - 2 * MAX_ROWS} more with --json" if len(rows) > 2 * MAX_ROWS else ""
    print("\n" + "\n".join(folded(f"Of {len(rows)} devices that run {what} with {asked}{more}. Prices are not known; "
                                  "memory stands for them.")))
