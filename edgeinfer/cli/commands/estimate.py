"""`edgeinfer estimate`: tokens per second of a model on a device, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import registry
from ...config import CUDA, DEFAULT_DRAFT_TOKENS, Recipe
from ..lengths import FLAGS, lengths_of
from ..machines import devices_of, machine_of, named_nodes
from ..modes import check_mode
from ..options import NOTHING, SAMPLES, Given, takes
from ..output import show
from ..reports import decision
from ..reports.estimate import chart, print_all_devices, print_estimate
from ..reports.estimate_fields import JSON_FIELDS as JSON_FIELDS
from ..reports.estimate_object import all_devices_object, estimate_object
from ..reports.on_gpu import Cards
from ..reports.questions import DEFAULT_ANSWER
from ..reports.storage import print_skipping
from . import estimate_options as options

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile


@takes("estimate")
def estimate(
    model: options.Model,
    prompt: options.Prompt = None,
    accepted: options.Accepted = 1.0,
    draft_cost: options.DraftCost = None,
    users: options.Users = None,
    answer: options.Answer = None,
    goodput: options.Goodput = None,
    draft: options.Draft = None,
    acceptance: options.Acceptance = None,
    draft_tokens: options.DraftTokens = None,
    speculate: options.Speculate = None,
    nodes: options.Nodes = None,
    link: options.NodeLink = None,
    energy: options.Energy = False,
    sparsity: options.Sparsity = None,
    rows: options.Rows = None,
    explain: options.Explain = False,
    all_devices: options.AllDevices = False,
    plot: options.Plot = None,
    html: options.Html = None,
    given: Given = NOTHING,
) -> None:
    """Predict the speed of a model on this or another machine.

    No weights are loaded or downloaded. The time of a token is the time to read its bytes plus a fixed time. The
    constants are those of this machine after 'edgeinfer devices --probe' and a few runs, otherwise those of the
    device's class. Where memory or --budget cannot hold all weights, the others are read from storage, of the kind that
    --storage names. The documentation of the estimator gives the formula, its constants and its error.

    \b
    Examples:
      edgeinfer estimate llama-2-7b --machine rpi5
      edgeinfer estimate ./my-bundle --ctx 32768 --plot speed.svg
      edgeinfer estimate llama-2-7b --machine h200 --samples 32
      edgeinfer estimate qwen3-8b --machine "m4 16gb" -p 2000 -n 500
      edgeinfer estimate llama-3.1-8b --machine l4 --users 8 --goodput ttft:2000,tpot:100
      edgeinfer estimate llama-3.1-8b --machine "m4 16gb" --draft llama-3.2-1b --acceptance 0.7
      edgeinfer estimate llama-3.1-8b --nodes "m4 16gb,rpi5 16gb" --link 2.5GbE -p 2000 -n 500
      edgeinfer estimate qwen3-30b-a3b --machine "rpi5 8gb" --storage nvme
      edgeinfer estimate llama-2-7b --machine rpi5-8gb --sparsity 0.8 --rows 4KiB
      edgeinfer estimate qwen3-8b --machine "m4 16gb" --html speed.html
      edgeinfer estimate qwen3-8b --weights int8 --all-devices
    """
    check_mode("estimate", "nodes" if nodes is not None else "all" if all_devices else
               "here" if _is_here(given) else "machine", given)
    options.check_request(given, prompt, answer, plot, html)
    if not given.by_flag(SAMPLES) and (users or draft or speculate == "lookup" or explain):
        given.n = 1  # of a variable, which gives way to a question about one sequence
    questions = options.questions_of(given, users, answer, goodput, explain, energy, sparsity, rows)
    options.check_drafting(accepted, draft_cost)
    questions = options.with_drafting(replace(questions, plots=html is not None), draft, acceptance, draft_tokens,
                                      speculate)
    drafting = accepted, draft_cost
    if nodes is not None:
        _on_nodes(model, nodes, options.DEFAULT_LINK if link is None else link, prompt, answer, given)
        return
    from edgeinfer.devices import load_profile

    from ...models.describe import describe

    one = None if all_devices else machine_of(given) or load_profile("local")
    own = given.runtime(draft_tokens=DEFAULT_DRAFT_TOKENS)
    asked, stored = replace(own, max_sequences=given.n), given.stored(model)
    described, decided = describe(model, *stored, own.recipe, one), None
    cards = Cards(lambda: describe(model, *stored, Recipe(())), asked, given.kv_on(CUDA))
    if one is not None and _is_here(given):
        described, _, decided = decision.described_as_run(described, own, given.max_kld)
    lengths = lengths_of(described.config, given.ctx, prompt, questions.tokens, FLAGS)
    ctx, length, questions = lengths.ctx, lengths.prompt, questions.within(lengths)
    asked = replace(asked, recipe=described.recipe, techniques=registry.settled(asked.techniques, described.layers))
    if draft is not None:
        questions = replace(questions, draft=options.draft_of(draft, described, stored, replace(asked, ctx=ctx)))
    if one is not None:
        out = estimate_object(described, one, ctx, length, given.kv, drafting, asked, given.n, cards, questions)
        _report({**out, "decision": decided}, one, plot, html, given.json)
        return
    out = all_devices_object(described, devices_of(given), ctx, length, given.kv, drafting, asked, given.n,
                             cards, questions)
    show(out, given.json, print_all_devices if sparsity is None else print_skipping)


def _is_here(given: Given) -> bool:
    return given.machine in (None, "local") and given.bandwidth is None


def _on_nodes(model: str, nodes: str, link: str, prompt: int | None, answer: int | None,
              given: Given) -> None:
    """Report on several machines."""
    from ...models.describe import describe
    from ...runtime import check_stage_config
    from ..reports.ways import print_ways, ways_object

    profiles, network = named_nodes(nodes, link)
    config = given.runtime()
    check_stage_config(config)
    described = describe(model, *given.stored(model), config.recipe)
    lengths = lengths_of(described.config, given.ctx, prompt, answer or DEFAULT_ANSWER, FLAGS)
    out = ways_object(described, replace(config, ctx=lengths.ctx), profiles, network, lengths.prompt,
                      lengths.answer or DEFAULT_ANSWER)
    out["notes"] = list(lengths.notes)
    show(out, given.json, print_ways)


def _save_page(out: dict[str, Any], device: DeviceProfile, path: Path) -> None:
    """Write the page, of a built-in shape with all its types."""
    from ...models import sizes
    from ...models.spoken import spoken
    from ..reports.comparison import compared
    from ..reports.page import estimate_body, save_page

    meant = None if Path(out["model"]).exists() else spoken(out["model"]).shape
    known = meant is not None and meant.name in sizes.names()
    budget = out["process_budget_bytes"] or (out["budget_bytes"] if out["limited"] else None)
    types = compared(out["model"], meant.name, device, out["ctx"], budget, sizes.TYPES) if meant and known else None
    save_page(out, estimate_body(out, types), path)


def _report(out: dict[str, Any], device: DeviceProfile, plot: str | None, html: str | None, json: bool) -> None:
    """Report on one device."""
    if html is not None:
        _save_page(out, device, Path(html))
    if plot is not None:
        from ..reports.plot import save_plot

        save_plot(chart(out), Path(plot))
    show(out, json, print_estimate)
