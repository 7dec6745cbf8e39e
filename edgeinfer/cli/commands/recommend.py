"""`edgeinfer recommend`: the models for a device, or the devices for a model and a speed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...base.validation import checked
from ...errors import UsageError
from ...models import sizes
from ...models.spoken import near_shapes, spoken
from ...models.uses import USES
from ..lengths import FLAGS, check_lengths
from ..machines import devices_of, machine_of
from ..modes import check_mode
from ..options import NOTHING, Given, takes
from ..output import show
from ..reports.recommendation import (
    DEFAULT_CTX,
    DEFAULT_SPEED,
    MAX_ROWS,
    SPEED,
    models_for,
    print_devices,
    print_models,
    smallest,
)

JSON_FIELDS = {
    "recommend": {
        "device": "name of the profile, with `device_title`; null with --all-devices",
        "ctx": "context in tokens; with `min_speed`, tokens per second, and `for`, the use",
        "models": "largest first: `model` (a built-in shape), `called`, `weights` (type), `parameters`, `total_bytes`, "
        "`decode_tok_per_s` with half the context filled, `low` and `high` of its band, `prompt` and `ttft_ms`, "
        "`kld` (least and largest that was measured of the type; null if none was), `program`, `unit`, `memory_bytes`",
        "model": "with --all-devices: the built-in shape; null for the largest of the use",
        "devices": "with --all-devices, the least memory first: the fields of a model, and `title`",
    },
}
"""Fields of the JSON object, by command."""


@takes("recommend")
def recommend(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", show_default=False, help="With --all-devices: the built-in shape to run."),
    ] = None,
    min_speed: Annotated[
        float, typer.Option("--min-speed", metavar="T", help="Minimum tokens per second.")
    ] = DEFAULT_SPEED,
    use: Annotated[str, typer.Option("--for", metavar="|".join(USES), help="Use of the model.")] = USES[0],
    all_devices: Annotated[
        bool, typer.Option("--all-devices", help="List the devices that are fast enough, the least memory first.")
    ] = False,
    given: Given = NOTHING,
) -> None:
    """Recommend models for a device, or devices for a speed.

    The models are built-in shapes that fit the device with all weights in memory, the largest first, each with the most
    exact type of weights that is fast enough. With --all-devices and MODEL the devices that run it fast enough are
    listed, the least memory first; without MODEL each device has the largest model for the use.

    \b
    Examples:
      edgeinfer recommend --machine "rpi5 8gb"
      edgeinfer recommend --machine "M4 Pro 48GB" --for code --ctx 16384 --min-speed 20
      edgeinfer recommend llama-3.1-8b --all-devices --min-speed 20
    """
    ctx = DEFAULT_CTX if given.ctx is None else given.ctx
    if model is not None and not all_devices:
        raise UsageError(f"recommend finds models for a device; 'edgeinfer plan {model or 'MODEL'}' plans one, and "
                         "--all-devices finds devices for it.")
    check_mode("recommend", "one" if not all_devices else "all" if model is None else "model", given)
    _check(ctx, min_speed, use)
    asked: dict[str, Any] = {"ctx": ctx, "min_speed": min_speed, "for": use}
    if all_devices:
        out = {"device": None, **asked, "model": None if model is None else _shape(model)}
        devices = devices_of(given)
        if out["model"]:
            longest = sizes.sized(out["model"], "q4").longest
            if ctx > longest:
                raise UsageError(f"--ctx is {ctx}, and {out['model']} takes {longest} tokens at most; lower it.")
            out["devices"] = smallest(devices, out["model"], ctx, min_speed)
        else:
            found = [(device, next(models_for(device, ctx, min_speed, use), None)) for device in devices]
            rows = [{**row, "title": device.title} for device, row in found if row]
            out["devices"] = sorted(rows, key=lambda row: (row["memory_bytes"], -row["parameters"]))
    else:
        from edgeinfer.devices import load_profile

        device = machine_of(given) or load_profile("local")
        rows = list(models_for(device, ctx, min_speed, use))
        out = {"device": device.name, "device_title": device.titled, **asked,
               "models": rows if given.json else rows[:MAX_ROWS]}
    show(out, given.json, print_devices if all_devices else print_models)


def _check(ctx: int, min_speed: float, use: str) -> None:
    if use not in USES:
        raise UsageError(f"--for is {use!r}; choose one of {', '.join(USES)}.")
    checked("--min-speed", min_speed, SPEED)
    check_lengths(FLAGS, ctx, None, None)


def _shape(model: str) -> str:
    said = spoken(model)
    if said.refused:
        raise UsageError(said.refused)
    meant = said.shape
    if meant is None or meant.name not in sizes.names():
        near = ", ".join(map(repr, near_shapes(model)))
        raise UsageError(f"{model!r} is not a built-in shape; similar names are {near}.")
    return meant.name
