"""`edgeinfer plan --compare`: a model with every type of weights that can be made or downloaded, on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...models import sizes
from ...quality.known import LOSSES, loss_words
from ..output import folded, print_table, speed
from .recommendation import PROMPT, one

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

MADE = ("f16", "int8", "q4")
"""Types that edgeinfer makes; the others are files."""


def compared(name: str, model: str, device: DeviceProfile, ctx: int, budget: int | None = None) -> dict[str, Any]:
    """Return the JSON object: a row for each type, whether it fits or not.

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
    """
    room = device.usable_bytes if budget is None else budget
    endless = replace(device, memory_bytes=1 << 49, memory_gib=())
    rows = []
    for kind in sizes.TYPES:
        found = one(endless, sizes.sized(model, kind), ctx)
        assert found is not None
        loss = LOSSES.get(kind)
        rows.append({
            "weights": kind, "made": kind in MADE, "file_bytes": sizes.sized(model, kind).file_bytes,
            "total_bytes": found["total_bytes"], "fits": found["total_bytes"] <= room, "low": found["low"],
            "high": found["high"], "decode_tok_per_s": found["decode_tok_per_s"], "ttft_ms": found["ttft_ms"],
            "kld": None if loss is None else list(loss), "program": found["program"], "unit": found["unit"],
        })
    return {"model": name, "shape": model, "device": device.name, "device_title": device.titled, "ctx": ctx,
            "prompt": min(PROMPT, ctx), "budget_bytes": room, "types": rows}


def print_comparison(out: dict[str, Any]) -> None:
    """Print the table, the answer first."""
    rows = out["types"]
    fitting = [row for row in rows if row["fits"] and row["weights"] != "f16"] or [row for row in rows if row["fits"]]
    where = f"{out['device_title']}, {format_size(out['budget_bytes'])}"
    if fitting:
        top = fitting[0]
        said = (f"{top['weights']} is the most exact that fits {where}: {format_size(top['total_bytes'])}, "
                f"{speed(top['decode_tok_per_s'])} tokens/s ({top['program']} on the {top['unit'].upper()}).")
    else:
        said = f"No type fits {where} with a context of {out['ctx']}; a smaller --ctx or model does."
    print("\n".join(folded(said)) + "\n")
    table = [("type", "from", "file", "memory", "fits", "tokens/s", "80 % band", "TTFT", "KLD")]
    for row in rows:
        wait = "" if row["ttft_ms"] is None else f"{row['ttft_ms'] / 1000:.1f} s"
        table.append((row["weights"], "convert" if row["made"] else "GGUF", format_size(row["file_bytes"]),
                      format_size(row["total_bytes"]), "yes" if row["fits"] else "no", speed(row["decode_tok_per_s"]),
                      f"{speed(row['low'])}-{speed(row['high'])}", wait, loss_words(row["weights"])))
    print_table(table, right=[2, 3, 5, 7])
    print("\n" + "\n".join(folded(
        f"{out['ctx']} tokens of context, half of it filled; TTFT is of a prompt of {out['prompt']}; speeds are as if "
        "all weights were in memory. KLD was measured on models of 5 million parameters; larger ones lose less; blank "
        "is not measured.")))
