"""`edgeinfer estimate`: tokens per second of a model on a device, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import technique
from ..checks import NATS, checked
from ..config import CUDA, DEFAULT_DRAFT_TOKENS, KV_TYPES, MAX_KLD, Recipe, RuntimeConfig
from ..errors import UsageError
from . import decision, neurons, windows
from .estimate_report import all_devices_object, chart, estimate_object, print_all_devices, print_estimate
from .on_gpu import Cards
from .options import (
    DEFAULT_RECIPE,
    NO_TECHNIQUES,
    Device,
    GroupSize,
    Json,
    Kv,
    MaxKld,
    Passes,
    Samples,
    Techniques,
    Weights,
    from_environment,
    kv_on,
    option,
    takes_techniques,
)
from .output import print_json

DEFAULT_CTX, MOST_CTX = 4096, (1 << 24) - 1
DEFAULT_PROMPT = 512
MOST_SAMPLES = 64
MOST_ACCEPTED = 64
"""Tokens of one sequence that a walk can check."""

JSON_FIELDS = {
    "estimate": {
        "model": "as given",
        "device": "name of the profile; with `device_title`, `device_class`, `bandwidth_gbs`",
        "ctx": "context in tokens; with `prompt`, `kv`, `weights`, `group_size`",
        "sequences": "that decode together, each with a context of its own; tokens per second are those of all",
        "decode_tok_per_s": "tokens per second at the end of the context",
        "decode_empty_tok_per_s": "tokens per second in an empty context, as published speeds are mostly measured",
        "low": "with `high` the band that holds 80 % of measurements",
        "ceiling_tok_per_s": "pure bandwidth: the bits of their types, without scales, for every weight that a token "
        "uses and every key and value that it sees, no other time; with --all-devices in an empty context and at the "
        "vendor's peak of the memory, so that no speed of the row is above",
        "program": "whose speed it is; with `unit` (cpu, gpu, npu) and `unit_words`; edgeinfer itself uses processors",
        "others": "per other program, or version of the device, of the sources: `name`, `decode_tok_per_s`; the band "
        "reaches to them",
        "remark": "where edgeinfer cannot use the unit, what that means; else empty",
        "accepted": "tokens that a pass yields; with `draft_cost`, the share of a token's time that drafting takes "
        "for a pass, and `draft_cost_assumed`",
        "prefill_tok_per_s": "of the prompt in an empty context; null where the device's peak is not known",
        "prefill_low": "with `prefill_high` its band",
        "ttft_ms": "time of the prompt, without loading; null where the device's peak is not known",
        "bytes_per_token": "read from memory for one token at the end of the context",
        "weight_bytes": "of all weights with their scales; `weight_bytes_read` those that a token reads",
        "kv_bytes": "keys and values of the whole context, with their scales, as far as windows let layers keep them",
        "windows": windows.FIELD,
        "kv_read": "of a token at the end of the context: `key_bytes`, `value_bytes`; `chosen`, whether rows of V are, "
        "`crossover_depth`, from where on that is faster, or null where it is not up to `longest_depth`, and what is "
        "`assumed` of scores",
        "pure": "figures without scales: `weight_bytes` (4 bits a weight), `kv_bytes` (a byte each), `parameters`",
        "bits_per_weight": "stored bits with scales, over all weights",
        "terms_ms": "milliseconds of one token, and of the prompt, by cause",
        "basis": "'this machine, calibrated', 'class NAME' or 'unknown'; `error` and `error_source` of the band",
        "file_types": "of a GGUF file or a quantised checkpoint: bytes by type, else null; `file_note` says what the "
        "figures mean",
        "fits": "as in `plan`: whether a run fits the device's memory, `memory_bytes`, of which the system keeps a "
        "part, "
        "on cards `device_bytes`, with weights read from storage where `run` does so by itself, as `mode` says; "
        "`total_bytes` is all that it takes (`unstreamed_bytes` with all weights in memory), of the "
        "process beside a card, and `run_kv` its type of the KV cache",
        "contexts": "per context `depth`, `decode_tok_per_s`, `low`, `high`",
        "break_even": "sparse FFN: `row_bytes`, `efficiency`, `sparsity` from which on it is faster, and by sparsity "
        "`smallest_row_bytes` and `relative_time`; null where scattered reads are not known",
        "neurons": neurons.FIELD,
        **technique.fields("estimate"),
        "decision": decision.FIELD + "; the estimate is of that way with all weights in memory; null for devices",
        "devices": "with --all-devices, instead of the device's fields: per device the same fields without `contexts`",
    },
}
"""Fields of the JSON object, by command."""


@takes_techniques("estimate")
def estimate(
    command: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", show_default=False,
            help="Bundle, checkpoint, config.json, GGUF file, known shape such as llama-2-7b, or hub id; no weights "
            "are read.",
        ),
    ],
    device: Device = None,
    ctx: Annotated[int | None, option(
        "-c", "--ctx", metavar="TOKENS",
        help="Context at whose end a token is generated.  [default: the model's, at most 4096]")] = None,
    prompt: Annotated[
        int | None,
        typer.Option("-p", metavar="TOKENS", help="Length of the prompt.  [default: 512, at most the context]"),
    ] = None,
    weights: Weights = None,
    group_size: GroupSize = None,
    kv: Kv = "int8",
    recipe: Passes = DEFAULT_RECIPE,
    techniques: Techniques = NO_TECHNIQUES,
    max_kld: MaxKld = MAX_KLD,
    samples: Samples = 1,
    accepted: Annotated[
        float, typer.Option(metavar="N", help="Tokens that one pass yields on average (speculative decoding).")
    ] = 1.0,
    draft_cost: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="With --accepted: time of drafting for one pass, as a share of a token of "
                     "the model.  [default: 0.1 for each token beyond the first]"),
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Estimate on every known device.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw tokens per second over the context: .svg, .png or .pdf.")
    ] = None,
    json: Json = False,
) -> None:
    """Say how fast a model will be, without loading or downloading its weights.

    The estimate adds the time of the bytes that a token reads to a fixed time; constants are those of this machine
    after 'edgeinfer devices --probe' and some runs, else those of the device's class. docs/estimator.md has the
    formula, its constants and how far off it was.

    \b
    Examples:
      edgeinfer estimate llama-2-7b --device rpi5
      edgeinfer estimate ./my-bundle --ctx 32768 --plot speed.svg
      edgeinfer estimate llama-2-7b --device h200 --samples 32
      edgeinfer estimate qwen3-8b --weights int8 --all-devices
    """
    if all_devices and from_environment(command, "device"):
        device = None
    check_request(device, ctx, prompt, kv, all_devices, plot)
    if not 1 <= accepted <= MOST_ACCEPTED:
        raise UsageError(f"--accepted {accepted:g} is out of range; a pass yields 1 to {MOST_ACCEPTED} tokens.")
    if draft_cost is not None and not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise UsageError(f"--draft-cost {draft_cost:g} is out of range; it is a share of a token's time, 0 or more.")
    if not 1 <= samples <= MOST_SAMPLES:
        raise UsageError(f"--samples {samples} is out of range; it must be from 1 to {MOST_SAMPLES}.")
    drafting = accepted, draft_cost
    from ..describe import describe
    from ..devices import load_profile, profiles

    one = None if all_devices else load_profile("local" if device is None else device)
    bound = checked("max_kld", max_kld, NATS)
    own = technique.configured(RuntimeConfig(ctx, kv, recipe=Recipe.parse(recipe), draft_tokens=DEFAULT_DRAFT_TOKENS),
                               techniques)
    asked = replace(own, max_sequences=samples)
    described, decided = describe(model, weights, group_size, own.recipe, one), None
    cards = Cards(lambda: describe(model, weights, group_size, Recipe(())), asked, kv_on(command, CUDA, kv))
    if device in (None, "local") and one is not None:
        described, _, decided = decision.described_as_run(described, own, bound)
    ctx = ctx or min(described.config.max_position_embeddings, DEFAULT_CTX)
    length = prompt or min(DEFAULT_PROMPT, ctx)
    asked = replace(asked, recipe=described.recipe, techniques=technique.settled(asked.techniques, described.layers))
    if one is not None:
        out = estimate_object(described, one, ctx, length, kv, drafting, asked, samples, cards)
        _report({**out, "decision": decided}, plot, json)
        return
    out = all_devices_object(described, list(profiles().values()), ctx, length, kv, drafting, asked, samples, cards)
    if json:
        print_json(out)
    else:
        print_all_devices(out)


def _report(out: dict[str, Any], plot: Path | None, json: bool) -> None:
    """Report on one device."""
    if plot is not None:
        from .plot import save_plot

        save_plot(chart(out), plot)
    if json:
        print_json(out)
    else:
        print_estimate(out)


def check_request(
    device: str | None, ctx: int | None, prompt: int | None, kv: str, all_devices: bool, plot: Path | None
) -> None:
    """Refuse what is wrong whatever the model and the device."""
    for flag, value in (("--ctx", ctx), ("-p", prompt)):
        if value is not None and not 1 <= value <= MOST_CTX:
            raise UsageError(f"{flag} {value} is out of range; it must be from 1 to {MOST_CTX} tokens.")
    if ctx is not None and prompt is not None and prompt > ctx:
        raise UsageError(f"-p {prompt} does not fit --ctx {ctx}; the prompt is part of the context.")
    if kv not in KV_TYPES:
        raise UsageError(f"kv is {kv!r}; choose one of {', '.join(KV_TYPES)}.")
    if all_devices and (device is not None or plot is not None):
        what = "--device" if device is not None else "--plot"
        raise UsageError(f"{what} belongs to one device; leave --all-devices out.")
    if plot is not None:
        from .plot import check_plot

        check_plot(plot)
