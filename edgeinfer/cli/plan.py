"""`edgeinfer plan`: what a run needs, whether it fits, and how fast it will be, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checks import NATS, checked
from ..config import (
    AUTO,
    BEAMS,
    CPU,
    CUDA,
    MAX_KLD,
    ONNX_CPU,
    GenerationConfig,
    Recipe,
    RuntimeConfig,
    check_own_layout,
    rows_for_guesses,
)
from ..errors import BudgetError, UsageError
from ..sizes import parse_size
from . import options
from .decision import described_as_run
from .on_gpu import PROMPT, served_as_asked, speed_object
from .output import alternative_object, not_ours, print_json
from .plan_report import JSON_FIELDS, print_names, print_report

if TYPE_CHECKING:
    from ..choice import Choice, Way
    from ..describe import ModelDescription
    from ..devices import DeviceProfile
    from ..memory_planner import Alternative, Beside, MemoryPlan

__all__ = ["JSON_FIELDS", "plan"]
_RUNTIME = RuntimeConfig()
LONGEST_CTX = 1 << 27
"""No model has positions beyond; a larger context is a slip."""
MOST_THREADS = 256
MOST_SAMPLES = 64
DEVICE_MEMORY = "memory of"


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
    sparse: options.Sparse = None,
    head: options.Head = None,
    attention: options.Attention = None,
    max_kld: options.MaxKld = MAX_KLD,
    lazy: options.Lazy = None,
    lazy_layers: options.LazyLayers = None,
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
    remark: `run` refuses them. With --device cuda or onnx-cpu the plan is that of a run on onnxruntime, and regions of
    the kind device are in the GPU's memory.

    \b
    Examples:
      edgeinfer plan llama-3.1-8b --device rpi5 --ctx 8192
      edgeinfer plan ./my-bundle --budget 2GiB --kv f16
      edgeinfer plan owner/model --weights int8 --json
    """
    from .. import opening
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
                           mmap=not no_mmap, recipe=Recipe.parse(recipe).sparse(sparse).head(head).attention(attention),
                           lazy=options.pruned(command, lazy, lazy_layers), kv_layout=kv_layout)
    if ctx is not None and ctx > LONGEST_CTX:
        raise UsageError(f"ctx is {ctx}; no model has a context above {LONGEST_CTX} tokens.")
    if device == AUTO:
        device = CPU if (found := opening.provider(device)) is None else found.device
    if device in (CUDA, ONNX_CPU):
        from .plan_device import planned_on

        on_kv = options.kv_on(command, device, kv)
        report = planned_on(device, model, (weights, group_size), config, on_kv)
        return _printed(report, json)
    check_own_layout(config)
    profile = None if device in (None, CPU) else load_profile(str(device))
    gpu = profile and served_as_asked(profile, config, options.kv_on(command, CUDA, kv))
    report = _planned(model, (weights, group_size), config, bound, profile, speculate, draft, gpu)
    return _printed(report, json)


def _printed(report: dict[str, Any], json: bool) -> int:
    """Print a report and return the exit code."""
    if json:
        print_json(report)
    else:
        print_report(report)
    return 0 if report["fits"] else BudgetError.exit_code


def _planned(name: str, stored: tuple[str | None, int | None], config: RuntimeConfig, max_kld: float,
             device: DeviceProfile | None, speculate: str, draft: str | None,
             gpu: DeviceProfile | None) -> dict[str, Any]:
    """Return the JSON object; a bundle that leaves a choice is planned as `run` would run it on this machine.

    `gpu` is the device as `run --device cuda` uses it, where that takes what is asked for.
    """
    from ..describe import describe
    from ..devices import local_profile

    model, choice, decision = describe(name, *stored, config.recipe, device), None, None
    beside = _guesser(speculate, draft, stored, model, config)
    if device is None:
        model, choice, decision = described_as_run(model, config, max_kld, beside)
    config = choice.way.config if choice else config
    profile = gpu or device or local_profile()
    report = _Planned(model, config, device, profile, choice, beside).report()
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

        return Lighter.of(model.config, config.recipe, _has_predictor(model), partial(planner, model.name)).beside
    if draft is None and speculate == "draft":
        raise UsageError("--speculate is draft, and no draft model is given; add --draft MODEL.")
    if draft is None or speculate not in ("auto", "draft"):
        return None
    from ..draft import check_context
    from ..memory_planner import beside_draft

    check_context(draft, describe(draft, *stored).config, model.config, config)
    return beside_draft(planner(draft))


def _has_predictor(model: ModelDescription) -> bool:
    from ..bundle import Bundle

    if model.bundle is None:
        return False
    with Bundle.open(model.bundle) as bundle:
        return any(entry.part == "predictor" for entry in bundle.header.files)


class _Planned:
    """One plan, what it was made for, and what else would fit."""

    def __init__(self, model: ModelDescription, config: RuntimeConfig, device: DeviceProfile | None,
                 profile: DeviceProfile | None, choice: Choice | None, beside: Beside | None = None):
        from ..memory_planner import Planner, default_ctx, default_threads, to_request

        threads = config.threads or (_cores(device) if device else default_threads())
        self.model, self.device, self.profile, self.choice = model, device, profile, choice
        self.config = replace(config, ctx=config.ctx or default_ctx(model.config), threads=threads)
        self.budget, self.budget_source = self._limit()
        self.planner = Planner(model.graph, model.weight_bytes, beside=beside)
        self.plan: MemoryPlan = self.planner.plan(to_request(self.config))

    def _limit(self) -> tuple[int, str]:
        from ..memory_planner import process_budget

        if self.config.budget_bytes is not None:
            return self.config.budget_bytes, "--budget"
        if self.device is not None:
            return self.device.memory_bytes, f"{DEVICE_MEMORY} {self.device.title}"
        return process_budget(), "what this system can give now"

    def report(self) -> dict[str, Any]:
        """Return the JSON object."""
        from ..memory_planner import alternatives, largest_ctx, refusal, streaming, without
        from .neurons import neurons_object
        from .windows import windows_object

        plan, config, model, own = self.plan, self.config, self.model, self.model.config.max_position_embeddings
        fits = plan.total_bytes <= self.budget
        options = [] if fits else [*filter(None, [without(self.planner, config, self.budget)]),
                                   *alternatives(self.planner, config, self.budget, model.rebuild)]
        options += [] if fits else [*self._cold(), *self._experts()]
        by_expert = any("kept_experts" in option.options for option in options)
        if not fits and not by_expert and (streamed := streaming(self.planner, config, self.budget)):
            options.append(streamed)
        report: dict[str, Any] = {
            "model": model.name, "source": model.source, "fits": fits,
            "parameters": model.parameters, "weights": model.quantisation.weights,
            "group_size": model.quantisation.group_size, "ctx": config.ctx, "kv": config.kv, "threads": config.threads,
            "device": None if self.device is None else self.device.name,
            "regions": [{"name": r.name, "bytes": r.nbytes, "kind": r.kind, "reason": r.reason} for r in plan.regions],
            "total_bytes": plan.total_bytes, "resident_bytes": plan.resident_bytes,
            "mapped_bytes": plan.mapped_bytes, "reclaimable_bytes": plan.reclaimable_bytes,
            "budget_bytes": self.budget, "budget_source": self.budget_source,
            "remaining_bytes": self.budget - plan.total_bytes,
            "max_ctx": largest_ctx(self.planner, config, self.budget, own), "model_ctx": own,
            "pure_weight_bytes": round(model.pure_weight_bytes(4)),
            "kv_bytes_per_position": model.kv_bytes_per_position[config.kv],
            "kv_bytes_unshared": model.kv_bytes_unshared[config.kv], "filed_bytes": plan.filed_bytes,
            "alternatives": [self._alternative(option) for option in options],
            "file_types": model.file_types or None,
            "estimate": (found := self._estimate()), "notes": self._notes(found),
            "neurons": neurons_object(model, self.profile), "lazy": self._pruned(),
            "windows": windows_object(plan),
        }
        if not fits:
            report["error"] = {"code": BudgetError.code, "message": refusal(plan, self.budget, options)}
        return report

    def _flash(self) -> list[Way]:
        """The way with this recipe that reads cold neurons from storage, where `run` has one."""
        ways = (self.choice.way, *self.choice.others) if self.choice else ()
        return [way for way in ways if way.plan.cold and way.config.recipe == self.config.recipe]

    def _cold(self) -> list[Alternative]:
        from ..memory_planner import cold

        return [cold(way.plan, way.read_bytes) for way in self._flash()]

    def _kept(self) -> MemoryPlan | None:
        """The plan that keeps some experts in memory, where `run` has one."""
        from ..memory_planner import to_request
        from ..offload import keep_experts

        return keep_experts(self.planner, to_request(self.config), self.budget)

    def _experts(self) -> list[Alternative]:
        from ..memory_planner import kept_experts
        from ..offload import from_flash

        plan = self._kept()
        return [kept_experts(plan, from_flash(plan.experts).nbytes)] if plan and plan.experts else []

    def _read_of_experts(self, option: Alternative) -> dict[str, Any]:
        """Return what tokens read of experts, and how fast they come where storage was measured."""
        from ..devices import estimate
        from ..offload import ALIKE, SKEWED, from_flash

        plan, found = self._kept(), {}
        assert plan and plan.experts
        for name, half in (("alike", ALIKE), ("skewed", SKEWED)):
            expected, speed = from_flash(plan.experts, half), None
            if self.profile is not None and self.profile.storage_sequential_gbs:
                traffic = replace(self.model.traffic(self.config.kv), flash_bytes=expected.nbytes)
                speed = estimate(self.profile, traffic, self.config.ctx or 0).decode_tok_per_s
            found[name] = {"busier_half": half, "hit_rate": expected.hit_rate, "streamed_bytes": round(expected.nbytes),
                           "decode_tok_per_s": speed}
        return {"experts": plan.experts.total, "streamed_bytes": option.streamed_bytes, "routing": found,
                "decode_tok_per_s": found["alike"]["decode_tok_per_s"]}

    def _alternative(self, option: Alternative) -> dict[str, Any]:
        """Return an alternative as a JSON object; how fast reading from storage is, where storage was measured."""
        from ..devices import estimate

        out, speed = alternative_object(option), None
        if "cold_neurons" in option.options:
            speed = next(way.at_depth(self.config.ctx or 0) for way in self._flash())
            return {**out, "streamed_bytes": option.streamed_bytes,
                    "decode_tok_per_s": speed if self.choice and self.choice.probed else None}
        if "kept_experts" in option.options:
            return {**out, **self._read_of_experts(option)}
        if "streamed_layers" not in option.options:
            return out
        if self.profile is not None and self.profile.storage_sequential_gbs:
            traffic = replace(self.model.traffic(self.config.kv), streamed_bytes=option.streamed_bytes)
            depth = int(option.options.get("ctx", self.config.ctx or 0))
            speed = estimate(self.profile, traffic, depth).decode_tok_per_s
        return {**out, "streamed_bytes": option.streamed_bytes, "decode_tok_per_s": speed}

    def _estimate(self) -> dict[str, Any] | None:
        """Return the speed with a full context, and with an empty one; None where this machine was not probed."""
        from ..devices import SERVED

        if self.profile is None:
            return None
        lazy, on_gpu = self._pruned(), self.profile.device_class == SERVED
        traffic = self.model.traffic("f16" if on_gpu else self.config.kv)
        return speed_object(self.profile, traffic, self.config.ctx or 0, self.config.max_sequences if on_gpu else 1,
                            lazy["share"] if lazy else 1.0)

    def _pruned(self) -> dict[str, Any] | None:
        """Return what will become of a prompt; None where none is pruned."""
        lazy, n_layers = self.config.lazy, self.model.layers
        return lazy.placed(n_layers).outlook(min(PROMPT, self.config.ctx or 0), n_layers) if lazy else None

    def _notes(self, found: dict[str, Any] | None) -> list[str]:
        notes, own = [], self.model.config.max_position_embeddings
        if self.model.file_note:
            notes.append(self.model.file_note)
        placed = next((way.sparse for way in self._flash()), self.model.sparse)
        if placed and (said := placed.sentence()):
            notes.append(said[0].upper() + said[1:])
        if placed and self.model.sparse and placed.runs != self.model.sparse.runs:
            notes.append("With neurons that are read from storage no layer falls back to dense or exact: masks say "
                         "what to read.")
        if (self.config.ctx or 0) > own:
            notes.append(f"The context of {self.config.ctx} tokens is longer than the model's {own}: run refuses it.")
        if found and self.profile and (remark := not_ours(found, self.profile)):
            notes.append(remark)
        if self.profile is None:
            notes.append("No estimate: this machine was not probed (edgeinfer devices --probe); or give --device.")
        elif self.profile.cores != self.config.threads and (self.device is None or self.profile.isa in _our_isas()):
            notes.append(f"The estimate is that of {self.profile.cores} threads on {self.profile.name}, not of "
                         f"{self.config.threads}.")
        if self.budget_source.startswith(DEVICE_MEMORY) and self.device and len(self.device.memory_gib) != 1:
            notes.append("The budget is all the memory of the device's largest common version: --budget says that "
                         "yours has less, or leaves room for the system and other programs.")
        if not self.config.mlock:
            notes.append("Weights are mapped from their file: the system may drop and read them again when memory is "
                         "short, which --mlock forbids.")
        return notes


def _cores(device: DeviceProfile) -> int:
    """Return the threads on a device: its processor cores; a GPU's multiprocessors run none."""
    return min(device.cores, MOST_THREADS) if device.isa in _our_isas() else 1


def _our_isas() -> set[str]:
    """Return the instruction sets of processors on which threads of ours run."""
    from ..kernels import LADDER

    return {isa.name for isa in LADDER}
