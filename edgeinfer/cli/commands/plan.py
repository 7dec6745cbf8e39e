"""`edgeinfer plan`: memory of a run, whether it fits, and its speed, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer import devices

from ... import backends, registry
from ...base.validation import checked
from ...config import (
    AUTO,
    CPU,
    CUDA,
    Recipe,
    RuntimeConfig,
    check_own_layout,
)
from ...errors import BudgetError, UsageError
from ...registry import RULES
from .. import options
from ..lengths import FLAGS, check_lengths, cut
from ..machines import machine_of, named_nodes
from ..modes import check_mode
from ..output import show
from ..replicas import checked_prefill
from ..reports.decision import described_as_run
from ..reports.nodes import DEFAULT_LINK, nodes_object, print_nodes
from ..reports.plan import JSON_FIELDS, print_names, print_report
from ..reports.plan_object import PlanReport

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ...llm.executors import Executor
    from ...registry import Drafting

__all__ = ["JSON_FIELDS", "plan"]
SERVED_SEQUENCES = 16
"""Number of sequences that a server runs at once, unless --max-sequences sets another."""


@options.takes("plan")
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", show_default=False,
            help="Bundle, checkpoint directory, config.json, GGUF file, built-in shape such as llama-2-7b, or hub id "
            "(only config.json is fetched).",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the built-in model shapes and exit.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan for serving: give the KV pool the rest of the budget, and print "
                                           "how many sequences fit.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all types of weights that can be made or "
                           "downloaded: memory, speed, loss.")
    ] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", show_default=False,
                                 help="With --compare: write the table with a plot as one self-contained page.")
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option("--max-sequences", metavar="N", show_default=False,
                                 help="With --serve: maximum number of sequences that run at once, 1 to 64.  "
                                 f"[default: {SERVED_SEQUENCES}]")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="NAME,...", show_default=False,
                                 help="Plan to split the layers between these machines, named as for --machine, in the "
                                 "order of the layers; local is this one. The last runs the server.")
    ] = None,
    link: Annotated[
        str | None, typer.Option("--link", metavar="NAME|RATE", show_default=False,
                                 help="With --nodes: the network between them, 100Mbit, 1GbE, 2.5GbE, 10GbE, wifi6, "
                                 f"tb4, or a rate such as 50MB/s.  [default: {DEFAULT_LINK}]")
    ] = None,
    prefill_device: Annotated[
        str | None, typer.Option("--prefill-device", metavar="DEVICE", show_default=False,
                                 help="Plan a replica of 'serve --prefill' that computes prompts on this device of "
                                 "onnxruntime.")
    ] = None,
    given: options.Given = options.NOTHING,
) -> int:
    """Print a model's memory and speed, and whether it fits.

    Nothing is loaded or downloaded, except config.json of a hub id. Each memory region is listed with its bytes and the
    reason for them; `run` allocates exactly these, up front. The budget is --budget, else the memory of --machine, else
    the available memory. A plan that does not fit is printed too, with alternatives that fit, and the exit
    code is 3. A context longer than the model's own is planned with a remark: `run` refuses it. With --device cuda or
    onnx-cpu, or the --machine of an NVIDIA card, the plan is that of a run on onnxruntime, and regions of the kind
    device are in GPU memory; for a model that this cannot run, the speed is that of another program, which the report
    names. With --serve many sequences share one KV pool, which gets the rest of the budget; without --budget a tenth of
    the memory is left to other programs. With --nodes the report says which layers each machine holds, and whether one
    of them alone is faster; --budget is then the memory of each.

    \b
    Examples:
      edgeinfer plan llama-3.1-8b --machine rpi5 --ctx 8192
      edgeinfer plan ./my-bundle --budget 2GiB --kv f16
      edgeinfer plan owner/model --weights int8 --json
      edgeinfer plan qwen3-8b --machine "m4 16gb" --compare --html types.html
      edgeinfer plan ./my-bundle --serve --budget 8GiB --ctx 8192
      edgeinfer plan llama-3.1-70b --nodes rpi5-16gb,rpi5-16gb,rpi5-16gb --link 2.5GbE
    """
    from ...models.describe import describe

    check_lengths(FLAGS, given.ctx, None, None)
    if listed:
        check_mode("plan", "list", given)
        print_names(given.json)
        return 0
    if model is None:
        raise UsageError("Missing argument 'MODEL': a GGUF file, checkpoint or bundle, an id on the hub, or a built-in "
                         "shape ('edgeinfer plan --list').")
    if prefill_device is not None:
        check_mode("plan", "prefill", given)
        return _prefilling(model, prefill_device, given)
    if compare:
        check_mode("plan", "compare", given)
        return _compared(model, html, given)
    if nodes is not None:
        check_mode("plan", "nodes", given)
    if serve:
        check_mode("plan", "serve", given)
    beams = 1 if serve else options.searching(given)
    drafting = registry.drafting(registry.agreed(given.techniques, given.flags, beams))
    sequences = _served(max_sequences) if serve else max(given.n, beams)
    config = given.runtime(max_sequences=sequences, draft_tokens=drafting.rows, fill_budget=serve,
                           own_tokens=max(given.max_tokens, 1) if beams > 1 else None)
    if nodes is not None:
        return _on_nodes(model, nodes, DEFAULT_LINK if link is None else link, given, config, drafting)
    if given.machine and given.device:  # of variables, the one that a flag does not contradict
        given.device, given.machine = (None, given.machine) if given.by_flag("machine") else (given.device, None)
    stored = given.stored(model)
    profile = machine_of(given)
    check_mode("plan", _mode_of(profile, given.device), given)
    kv = given.kv_on(given.device or (CPU if profile is None else profile.name))
    found = executor_for(given.device, profile, model, stored, config, kv)
    if found and found.planner:
        from ..reports.plan_device import planned_on

        return _printed(planned_on(found, describe(model, *stored, Recipe(())), drafting), given)
    check_own_layout(config)
    refused = found.refused if found else ""
    return _printed(planned_here(model, stored, config, given.max_kld, profile, drafting, refused), given)


def _mode_of(profile: DeviceProfile | None, device: str | None) -> str:
    """Return the name of the mode of a plan for one device."""
    if profile is None:
        return "here" if device in (None, CPU, AUTO) else "device"
    return "card" if profile.own_memory or devices.served(profile) else "machine"


def _compared(model: str, html: str | None, given: options.Given) -> int:
    """Print a model with all types of weights, or write it as a page, and return the exit code."""
    from ...models import DEMO, is_hub_id, sizes
    from ...models.spoken import spoken
    from ..reports.comparison import compared, compared_of, print_comparison
    from ..reports.page import check_page, comparison_body, save_page

    if html is not None:
        check_page(html)
    device = machine_of(given) or devices.load_profile("local")
    named = model != DEMO and not is_hub_id(model) and not Path(model).expanduser().exists()
    meant = spoken(model).shape if named else None
    if meant is None or meant.name not in sizes.names():
        out = compared_of(model, device, given.ctx, given.budget)
    else:
        longest = sizes.sized(meant.name, "q4").longest
        out = compared(model, meant.name, device, given.ctx or min(longest, sizes.CTX), given.budget)
    if html is not None:
        save_page(out, comparison_body(out), Path(html))
    show(out, given.json, print_comparison)
    return 0 if any(row["fits"] for row in out["types"]) else BudgetError.exit_code


def _served(most: int | None) -> int:
    """Return how many sequences a server runs at once."""
    return SERVED_SEQUENCES if most is None else int(checked("--max-sequences", most, RULES["max_sequences"]))


def _prefilling(model: str, device: str, given: options.Given) -> int:
    """Report on a replica that computes prompts on a device, and return the exit code."""
    from ...llm.executors import executor_on
    from ...models.describe import describe
    from ...techniques import WITHOUT_DRAFTS
    from ..reports.plan_device import planned_on

    config, card = checked_prefill(device, model, given), machine_of(given)
    if card and device != CUDA:
        raise UsageError(f"--prefill-device {device} is planned only for this machine; leave out --machine "
                         f"{card.name}, or use --prefill-device cuda with an NVIDIA GPU.")
    if card and not devices.served(card):
        raise UsageError(f"--prefill-device {device} needs an NVIDIA GPU, and --machine {card.name} is none; name one, "
                         "such as --machine rtx4090, or leave --machine out for the GPU of this machine.")
    description = describe(model, *given.stored(model), Recipe(()))
    found = executor_on(backends.PROVIDERS[device], description.graph, config)
    found = found._replace(profile=devices.served(card) if card else None)
    return _printed(planned_on(found, description, registry.drafting(WITHOUT_DRAFTS)), given)


def _on_nodes(model: str, nodes: str, link: str, given: options.Given, config: RuntimeConfig,
              drafting: Drafting) -> int:
    """Report on a model whose layers are on several machines, and return the exit code."""
    from ...models.describe import describe
    from ...runtime import check_stage_config

    profiles, network = named_nodes(nodes, link)
    check_stage_config(config)
    described = describe(model, *given.stored(model), config.recipe)
    if drafting.draft_memory(described, given.stored(model), config):
        raise UsageError("A model that is split between processes cannot run with a drafter; leave it out.")
    report = nodes_object(described, config, profiles, network)
    report["notes"] = _cut(report["ctx"], described.config.max_position_embeddings, given)
    show(report, given.json, print_nodes)
    return 0 if report["fits"] else BudgetError.exit_code


def _cut(ctx: int, longest: int, given: options.Given) -> list[str]:
    """Return the remark on an answer that does not fit the context, if one was asked for."""
    said = given.by_flag("max_tokens") and cut(ctx, given.max_tokens, longest, FLAGS)
    return [said] if said else []


def executor_for(device: str | None, profile: DeviceProfile | None, name: str, stored: tuple[str | None, int | None],
              config: RuntimeConfig, kv: str | None) -> Executor | None:
    """Return the executor of the model if it may differ from our own kernels."""
    if (device in (None, CPU) and profile is None) or (profile and not devices.served(profile)):
        return None
    from ...llm import executors
    from ...llm import open as opening
    from ...models.describe import describe

    if profile is None and device == AUTO and opening.provider(AUTO) is None:
        return None
    graph = describe(name, *stored, Recipe(())).graph
    if profile:
        return executors.executor_of(profile, graph, config, kv)
    provider = backends.PROVIDERS[CUDA if device == AUTO else str(device)]
    return executors.executor_here(str(device), provider, graph, config, kv)


def _printed(report: dict[str, Any], given: options.Given) -> int:
    """Print a report and return the exit code."""
    report["notes"] += _cut(report["ctx"], report["model_ctx"], given)
    if given.by_flag("state_memory") and report["state"] is None:
        report["notes"].append("--state-memory has no effect, because the model has no recurrent layers.")
    show(report, given.json, print_report)
    return BudgetError.exit_code if report["fits"] is False else 0


def planned_here(name: str, stored: tuple[str | None, int | None], config: RuntimeConfig, max_kld: float,
             device: DeviceProfile | None, drafting: Drafting, refused: str = "") -> dict[str, Any]:
    """Return the JSON object; a bundle that leaves a choice is planned as `run` would run it on this machine.

    `refused` says why CUDA does not run the model, where a card was asked about.
    """
    from ...models.describe import describe

    draft_memory = None
    if drafting.model:  # first, as in run
        draft_memory = drafting.draft_memory(describe(name, *stored), stored, config)
    model, choice, decision = describe(name, *stored, config.recipe, device), None, None
    draft_memory = draft_memory or drafting.draft_memory(model, stored, config)
    if device is None:
        model, choice, decision = described_as_run(model, config, max_kld, draft_memory)
    config = choice.strategy.config if choice else config
    profile = device or devices.local_profile()
    report = PlanReport(model, config, device, profile, choice, draft_memory, refused).report()
    return {**report, "decision": decision}
