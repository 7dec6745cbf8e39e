"""`edgeinfer plan`: what a run needs, whether it fits, and how fast it will be, before anything is loaded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checks import NATS, checked
from ..config import (
    AUTO,
    BEAMS,
    CPU,
    CUDA,
    DEVICES,
    MAX_KLD,
    GenerationConfig,
    Recipe,
    RuntimeConfig,
    check_own_layout,
    rows_for_guesses,
)
from ..errors import BudgetError, UsageError
from ..sizes import parse_size
from ..technique import configured
from . import options
from .decision import described_as_run
from .output import print_json
from .plan_object import PlanReport
from .plan_report import JSON_FIELDS, print_names, print_report

if TYPE_CHECKING:
    from ..describe import ModelDescription
    from ..devices import DeviceProfile
    from ..executors import Executor
    from ..memory_planner import Beside

__all__ = ["JSON_FIELDS", "plan"]
_RUNTIME = RuntimeConfig()
LONGEST_CTX = 1 << 27
"""No model has positions beyond; a larger context is a slip."""
MOST_SAMPLES = 64


@options.takes_techniques("plan")
def plan(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", show_default=False,
            help="Bundle, checkpoint directory, config.json, GGUF file, built-in shape such as llama-2-7b, or hub id "
            "(only config.json is fetched).",
        ),
    ] = None,
    device: options.PlanOn = None,
    kv_layout: options.KvLayout = None,
    ctx: options.Ctx = None,
    budget: options.Budget = None,
    weights: options.Weights = None,
    group_size: options.GroupSize = None,
    kv: options.Kv = _RUNTIME.kv,
    threads: options.Threads = None,
    samples: options.Samples = GenerationConfig.n,
    beams: options.Beams = GenerationConfig.beams,
    max_tokens: options.MaxTokens = GenerationConfig.max_tokens,
    prefill_chunk: options.PrefillChunk = _RUNTIME.prefill_chunk,
    mlock: options.Mlock = False,
    no_mmap: options.NoMmap = False,
    recipe: options.Passes = options.DEFAULT_RECIPE,
    techniques: options.Techniques = options.NO_TECHNIQUES,
    max_kld: options.MaxKld = MAX_KLD,
    speculate: options.Speculate = "auto",
    draft_tokens: options.DraftTokens = options.DRAFT_TOKENS,
    draft: options.Draft = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the names of models that are known without their files, and end.")
    ] = False,
    json: options.Json = False,
) -> int:
    """Say what a run needs, whether it fits and how fast it will be; nothing is loaded.

    Every region of memory has its bytes and the reason for them; `run` takes exactly these, up front. The budget is
    --budget, else the memory of --device, else what this system can give now. A plan that does not fit is printed too,
    with what would fit instead, and the exit code is 3. Contexts beyond the model's own limit are planned, with a
    remark: `run` refuses them. With --device cuda or onnx-cpu, or that of an NVIDIA card, the plan is that of a run on
    onnxruntime, and regions of the kind device are in the GPU's memory; of models that it lacks the figures are those
    of another program, by its name.

    \b
    Examples:
      edgeinfer plan llama-3.1-8b --device rpi5 --ctx 8192
      edgeinfer plan ./my-bundle --budget 2GiB --kv f16
      edgeinfer plan owner/model --weights int8 --json
    """
    from ..describe import describe
    from ..devices import load_profile

    if listed:
        print_names(json)
        return 0
    if model is None:
        raise UsageError("Missing argument 'MODEL': a bundle, a checkpoint, or one of 'edgeinfer plan --list'.")
    if not 1 <= samples <= MOST_SAMPLES:
        raise UsageError(f"--samples {samples} is out of range; it must be from 1 to {MOST_SAMPLES}.")
    limit, bound = None if budget is None else parse_size(budget), checked("max_kld", max_kld, NATS)
    beams = checked("beams", options.searching(command, beams), BEAMS)
    speculate, draft = options.guessing(command, speculate, draft, beams)
    GenerationConfig(speculate=speculate, draft_tokens=draft_tokens, beams=beams)
    own_tokens = max(max_tokens, 1) if beams > 1 else None
    config = RuntimeConfig(ctx, kv, threads, limit, prefill_chunk, max(samples, beams), own_tokens, mlock=mlock,
                           draft_tokens=rows_for_guesses(speculate, draft_tokens),
                           mmap=not no_mmap, recipe=Recipe.parse(recipe), kv_layout=kv_layout)
    config = configured(config, techniques)
    if ctx is not None and ctx > LONGEST_CTX:
        raise UsageError(f"ctx is {ctx}; no model has a context above {LONGEST_CTX} tokens.")
    stored = weights, group_size
    profile = None if device in (None, *DEVICES) else load_profile(str(device))
    found = _executor(device, profile, model, stored, config, options.kv_on(command, device or CPU, kv))
    if found and found.planner:
        from .plan_device import planned_on

        guesser = draft if speculate in ("auto", "draft") else None
        return _printed(planned_on(found, describe(model, *stored, Recipe(())), speculate, guesser), json)
    check_own_layout(config)
    refused = found.refused if found else ""
    return _printed(_planned(model, stored, config, bound, profile, speculate, draft, refused), json)


def _executor(device: str | None, profile: DeviceProfile | None, name: str, stored: tuple[str | None, int | None],
              config: RuntimeConfig, kv: str | None) -> Executor | None:
    """Return who runs the model where that may be another than our own kernels."""
    from ..devices import served

    if device in (None, CPU) or (profile and not served(profile)):
        return None
    from .. import executors, opening
    from ..describe import describe

    if profile is None and device == AUTO and opening.provider(AUTO) is None:
        return None
    graph = describe(name, *stored, Recipe(())).graph
    if profile:
        return executors.executor_of(profile, graph, config, kv)
    from ..backends import PROVIDERS

    return executors.executor_here(str(device), PROVIDERS[CUDA if device == AUTO else str(device)], graph, config, kv)


def _printed(report: dict[str, Any], json: bool) -> int:
    """Print a report and return the exit code."""
    if json:
        print_json(report)
    else:
        print_report(report)
    return BudgetError.exit_code if report["fits"] is False else 0


def _planned(name: str, stored: tuple[str | None, int | None], config: RuntimeConfig, max_kld: float,
             device: DeviceProfile | None, speculate: str, draft: str | None,
             refused: str = "") -> dict[str, Any]:
    """Return the JSON object; a bundle that leaves a choice is planned as `run` would run it on this machine.

    `refused` says why CUDA does not run the model, where a card was asked about.
    """
    from ..describe import describe
    from ..devices import local_profile

    model, choice, decision = describe(name, *stored, config.recipe, device), None, None
    beside = _guesser(speculate, draft, stored, model, config)
    if device is None:
        model, choice, decision = described_as_run(model, config, max_kld, beside)
    config = choice.way.config if choice else config
    report = PlanReport(model, config, device, device or local_profile(), choice, beside, refused).report()
    return {**report, "decision": decision}


def _guesser(speculate: str, draft: str | None, stored: tuple[str | None, int | None], model: ModelDescription,
             config: RuntimeConfig) -> Beside | None:
    """Return what guesses beside a model; `run` will compare the tokenizers too."""
    from ..describe import describe
    from ..memory_planner import Planner

    def planner(name: str, recipe: Recipe | None = None) -> Planner:
        found = describe(name, *stored, recipe)
        return Planner(found.graph, found.weight_bytes)

    if speculate == "self":
        from ..runtime import Lighter

        return Lighter.of(model.config, config.recipe, _parts(model), partial(planner, model.name)).beside
    if draft is None and speculate == "draft":
        raise UsageError("--speculate is draft, and no draft model is given; add --draft MODEL.")
    if draft is None or speculate not in ("auto", "draft"):
        return None
    from ..draft import check_context
    from ..memory_planner import beside_draft

    check_context(draft, describe(draft, *stored).config, model.config, config)
    return beside_draft(planner(draft))


def _parts(model: ModelDescription) -> frozenset[str]:
    from ..bundle import Bundle

    if model.bundle is None:
        return frozenset()
    with Bundle.open(model.bundle) as bundle:
        return bundle.parts
