"""`edgeinfer estimate`: tokens per second of a model on a device, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import registry
from ...config import CUDA, DEFAULT_DRAFT_TOKENS, Recipe
from ...errors import UsageError
from ..machines import devices_of, machine_of
from ..options import NOTHING, Given, takes
from ..output import print_json
from ..reports import decision, neurons, windows
from ..reports.estimate import chart, print_all_devices, print_estimate
from ..reports.estimate_object import Questions, all_devices_object, estimate_object
from ..reports.explain import FIELD as EXPLAIN_FIELD
from ..reports.on_gpu import Cards
from ..reports.users import FIELD as USERS_FIELD
from ..reports.users import check_users

DEFAULT_CTX, MOST_CTX = 4096, (1 << 24) - 1
DEFAULT_PROMPT = 512
MOST_ACCEPTED = 64
"""Tokens of one sequence that a forward pass can check."""

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
        "part, on cards `device_bytes`, with weights read from storage where `run` does so automatically, as `mode` "
        "says; `total_bytes` is all that it takes (`unstreamed_bytes` with all weights in memory), of the process "
        "beside a card, and `run_kv` its type of the KV cache",
        "contexts": "per context `depth`, `decode_tok_per_s`, `low`, `high`",
        "break_even": "sparse FFN: `row_bytes`, `efficiency`, `sparsity` from which on it is faster, and by sparsity "
        "`smallest_row_bytes` and `relative_time`; null where scattered reads are not known",
        "neurons": neurons.FIELD,
        "answer": "with -n: `tokens`, `ttft_ms`, `tpot_ms` in the middle of the answer, `total_ms` = TTFT + "
        "TPOT (n - 1); else null",
        "explain": EXPLAIN_FIELD,
        "users": USERS_FIELD,
        **registry.fields("estimate"),
        "decision": decision.FIELD + "; the estimate is of that way with all weights in memory; null for devices",
        "devices": "with --all-devices, instead of the device's fields: per device the same fields without `contexts`",
    },
}
"""Fields of the JSON object, by command."""


@takes("estimate")
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", show_default=False,
            help="Bundle, checkpoint, config.json, GGUF file, known shape such as llama-2-7b, or hub id; no weights "
            "are read.",
        ),
    ],
    prompt: Annotated[
        int | None,
        typer.Option("-p", metavar="TOKENS", help="Prompt length.  [default: 512, at most the context]"),
    ] = None,
    accepted: Annotated[
        float, typer.Option(metavar="N", help="Speculative decoding: mean number of tokens per forward pass.")
    ] = 1.0,
    draft_cost: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="With --accepted: drafting time per forward pass as a fraction of a token's "
                     "time.  [default: 0.1 for each token beyond the first]"),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(metavar="N", show_default=False, help="Also predict what N users get who ask at the same time."),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option("-n", "--answer", metavar="TOKENS", show_default=False, help="Length of an answer: the time of "
                     "its first word, of a token and in total.  [default: 128 with --users]"),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(metavar="METRIC:MS,...", show_default=False,
                     help="With --users: how many meet these bounds, such as ttft:500,tpot:100."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Write the formulas out with their numbers, limits and techniques.")
    ] = False,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Estimate on every known device.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot tokens per second by context size: .svg, .png or .pdf.")
    ] = None,
    given: Given = NOTHING,
) -> None:
    """Predict the speed of a model on this or another machine.

    No weights are loaded or downloaded. The time of a token is the time to read its bytes plus a fixed time. The
    constants are those of this machine after 'edgeinfer devices --probe' and a few runs, otherwise those of the
    device's class. The documentation of the estimator gives the formula, its constants and its error.

    \b
    Examples:
      edgeinfer estimate llama-2-7b --machine rpi5
      edgeinfer estimate ./my-bundle --ctx 32768 --plot speed.svg
      edgeinfer estimate llama-2-7b --machine h200 --samples 32
      edgeinfer estimate qwen3-8b --machine "m4 16gb" -p 2000 -n 500
      edgeinfer estimate llama-3.1-8b --machine l4 --users 8 --goodput ttft:2000,tpot:100
      edgeinfer estimate qwen3-8b --weights int8 --all-devices
    """
    if all_devices and not given.by_flag("machine") and not given.by_flag("device"):
        given.machine = None
    check_request(given, prompt, all_devices, plot)
    questions = _questions(users, answer, goodput, explain, all_devices)
    if not 1 <= accepted <= MOST_ACCEPTED:
        raise UsageError(f"--accepted is {accepted:g}; a forward pass yields 1 to {MOST_ACCEPTED} tokens.")
    if draft_cost is not None and not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise UsageError(f"--draft-cost is {draft_cost:g}; it must be a share of a token's time, 0 or more.")
    drafting = accepted, draft_cost
    from edgeinfer.devices import load_profile

    from ...models.describe import describe

    one = None if all_devices else machine_of(given) or load_profile("local")
    own = given.runtime(draft_tokens=DEFAULT_DRAFT_TOKENS)
    asked, stored = replace(own, max_sequences=given.n), given.stored(model)
    described, decided = describe(model, *stored, own.recipe, one), None
    cards = Cards(lambda: describe(model, *stored, Recipe(())), asked, given.kv_on(CUDA))
    if one is not None and given.machine in (None, "local") and given.bandwidth is None:
        described, _, decided = decision.described_as_run(described, own, given.max_kld)
    ctx = given.ctx or min(described.config.max_position_embeddings, DEFAULT_CTX)
    length = prompt or min(DEFAULT_PROMPT, ctx)
    asked = replace(asked, recipe=described.recipe, techniques=registry.settled(asked.techniques, described.layers))
    if one is not None:
        out = estimate_object(described, one, ctx, length, given.kv, drafting, asked, given.n, cards, questions)
        _report({**out, "decision": decided}, plot, given.json)
        return
    out = all_devices_object(described, devices_of(given), ctx, length, given.kv, drafting, asked, given.n,
                             cards)
    if given.json:
        print_json(out)
    else:
        print_all_devices(out)


def _questions(users: int | None, answer: int | None, goodput: str | None, explain: bool,
               all_devices: bool) -> Questions:
    """Return the questions about a single device."""
    check_users(users, 1 if answer is None else answer)
    for flag, value in (("--users", users), ("-n", answer), ("--goodput", goodput), ("--explain", explain or None)):
        if value is not None and all_devices:
            raise UsageError(f"{flag} applies to a single machine; omit --all-devices.")
    if goodput is None:
        return Questions(users, answer, explain=explain)
    if users is None:
        raise UsageError(f"--goodput {goodput} is of several users; add --users N.")
    from ...bench import parse_goodput

    return Questions(users, answer, parse_goodput(goodput), explain)


def _report(out: dict[str, Any], plot: Path | None, json: bool) -> None:
    """Report on one device."""
    if plot is not None:
        from ..reports.plot import save_plot

        save_plot(chart(out), plot)
    if json:
        print_json(out)
    else:
        print_estimate(out)


def check_request(given: Given, prompt: int | None, all_devices: bool, plot: Path | None) -> None:
    """Refuse what is wrong whatever the model and the machine."""
    for flag, value in (("--ctx", given.ctx), ("-p", prompt)):
        if value is not None and not 1 <= value <= MOST_CTX:
            raise UsageError(f"{flag} is {value}; it must be from 1 to {MOST_CTX} tokens.")
    if given.ctx is not None and prompt is not None and prompt > given.ctx:
        raise UsageError(f"-p {prompt} does not fit --ctx {given.ctx}; the prompt is part of the context.")
    if all_devices and (given.machine is not None or plot is not None):
        what = "--machine" if given.machine is not None else "--plot"
        raise UsageError(f"{what} applies to a single machine; omit --all-devices.")
    if plot is not None:
        from ..reports.plot import check_plot

        check_plot(plot)
