"""Opening of a model: its executor, its drafter, and the strategy of a bundle that leaves a choice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import backends, pipeline, registry
from ..config import CPU, Recipe, RuntimeConfig
from ..errors import UsageError
from .settings import asked_of

OpenStages = Callable[["Bundle", RuntimeConfig, "OnProgress | None"], "Runner"]
"""Opens the stages of a bundle and returns their runner."""
SHARING = 4
"""Sequences that run together where nothing else is requested."""

if TYPE_CHECKING:
    from edgeinfer.memory_planner import DraftMemory, MemoryPlan

    from ..backends import Provider
    from ..base.progress import OnProgress
    from ..bundle import Bundle
    from ..engine.speculation.load import Draft
    from ..graph import Graph, ModelConfig
    from ..runner import Runner
    from ..runtime import DraftHeadPlan, SelfDraftPlan, Session
    from ..text import ChatTemplate, Tokenizer
    from .settings import Asked
    from .strategy import Choice


class Opened(NamedTuple):
    """An open model; the attributes of `LLM` have these names."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    runner: Runner
    draft: Runner | None
    choice: Choice | None
    approximated: bool


class _Ready(NamedTuple):
    """A bundle that is open, and how it is to be run."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    provider: Provider | None
    config: RuntimeConfig
    companion: Any
    """The drafter to open beside it, or None."""


def _ready(path: Path, asked: Asked, provider: Provider | None, opened: ExitStack) -> _Ready:
    """Open a bundle and its tokenizer, and settle the executor and the drafter."""
    from ..bundle import Bundle
    from ..text import Tokenizer

    bundle = Bundle.open(path)
    opened.callback(bundle.close)
    provider, config = settled(asked.others["device"], provider, bundle, asked.config, asked.kv)
    if config.techniques:
        config = replace(config, techniques=registry.settled(config.techniques, bundle.config.num_hidden_layers))
    if asked.shares and not provider:
        config = sharing(config, bundle.config)
    tokenizer = Tokenizer.of_model(path, bundle.files, bundle.config)
    if provider:
        asked.drafting.check_device(provider.device, bool(bundle.config.recurrent))
    companion = asked.drafting.companion(bundle, tokenizer, config, asked.others["progress"], opened)
    return _Ready(bundle, tokenizer, provider, config, companion)


def open_model(path: Path, asked: Asked, provider: Provider | None) -> Opened:
    """Open a bundle, its tokenizer and template, its executor and its drafter.

    Parameters
    ----------
    path : Path
    asked : Asked
    provider : Provider, optional
        Provider that may run models on the device; None: our own kernels.
    """
    from ..text import ChatTemplate

    progress, split = asked.others["progress"], asked.others["split"]
    with ExitStack() as opened:  # whatever fails below, nothing stays open
        bundle, tokenizer, provider, config, companion = _ready(path, asked, provider, opened)
        template = ChatTemplate.open(path)
        if split is not None:
            runner = in_stages(bundle, config, split, asked.others["device"], companion, progress)
            opened.pop_all()
            return Opened(bundle, tokenizer, template, runner, None, None, False)
        if provider:
            runner, draft = opened_on(provider, bundle, config, companion, progress, opened)
            opened.pop_all()
            return Opened(bundle, tokenizer, template, runner, draft, None, False)
        draft_memory = companion.draft_memory if companion else None
        chosen = choice(bundle, config, asked.others["max_kld"], draft_memory)
        own = session(bundle, chosen.strategy.config if chosen else config, progress, draft_memory)
        opened.callback(own.close)
        draft = companion.open(own) if companion else None
        opened.pop_all()
        return Opened(bundle, tokenizer, template, own, draft, chosen, own.config.recipe != config.recipe)


def plan_model(**options: Any) -> MemoryPlan:
    """Return the plan that `LLM` would have with these arguments, and load nothing; raises as `LLM`."""
    asked = asked_of(options)
    executor = provider(asked.others["device"])
    with ExitStack() as opened:
        bundle, _, executor, config, companion = _ready(asked.resolved(), asked, executor, opened)
        if executor:
            from ..backends import device_planner, fit_device

            return fit_device(*device_planner(as_stored(bundle), config, executor, config.kv))
        from ..runtime import plan_run

        draft_memory = companion.draft_memory if companion else None
        chosen = choice(bundle, config, asked.others["max_kld"], draft_memory)
        return plan_run(bundle, chosen.strategy.config if chosen else config, registry.placer(bundle.config, bundle),
                        draft_memory).plan


def provider(device: str | None) -> Provider | None:
    """Return the executor that replaces our own kernels; most runs have none and import nothing for it."""
    if device in (None, CPU):
        return None
    return backends.provider_of(device)


def settled(device: str | None, provider: Provider | None, bundle: Bundle, config: RuntimeConfig,
            kv: str | None) -> tuple[Provider | None, RuntimeConfig]:
    """Return the executor of a bundle, and the settings of the run that it accepts; see `executors.settled`."""
    if provider is None:  # as nearly always: nothing is imported for it
        return None, config
    from . import executors

    return executors.settled(device, provider, bundle, config, kv)


def taken(device: str, provider: Provider | None, path: Path, config: RuntimeConfig,
          kv: str | None) -> tuple[Provider | None, RuntimeConfig]:
    """Return the result of `settled` for a bundle that is not open."""
    if provider is None:
        return None, config
    from ..bundle import Bundle

    with Bundle.open(path) as bundle:
        return settled(device, provider, bundle, config, kv)


def sharing(config: RuntimeConfig, model: ModelConfig) -> RuntimeConfig:
    """Return the settings with which a few sequences share the memory that one may fill."""
    from edgeinfer.memory_planner import default_ctx

    return replace(config, max_sequences=SHARING, kv_tokens=config.ctx or default_ctx(model), kv_windows=1,
                   verified_sequences=1)


def session(bundle: Bundle, config: RuntimeConfig, progress: OnProgress | None,
            draft_memory: DraftMemory | None) -> Session:
    """Open a model for our own kernels."""
    from ..runtime import Session

    return Session(bundle, config, progress=progress and partial(progress, "compile"),
                   loading=progress and partial(progress, "load"), placer=registry.placer(bundle.config, bundle),
                   draft_memory=draft_memory)


def in_stages(bundle: Bundle, config: RuntimeConfig, split: str | OpenStages, device: str | None, companion: object,
              progress: OnProgress | None) -> Runner:
    """Open a model whose layers are in several processes."""
    for wrong, what in ((device not in (None, CPU), f"on the device {device}"), (companion, "with a drafter")):
        if wrong:
            raise UsageError(f"A model that is split between processes cannot run {what}; leave it out.")
    if not isinstance(split, str):
        return split(bundle, config, progress)
    return pipeline.open_pipeline(bundle, config, pipeline.split_of(split, bundle), True,
                                  progress and partial(progress, "compile"), progress and partial(progress, "load"))


def opened_on(provider: Provider, bundle: Bundle, config: RuntimeConfig,
              companion: Draft | SelfDraftPlan | DraftHeadPlan | None, progress: OnProgress | None,
              opened: ExitStack) -> tuple[Runner, Runner | None]:
    """Open a model on a device, and after it its draft model, which is in the same plan."""
    say = progress and partial(progress, "lower")
    if companion is None:
        runner = backends.OnnxRunner(bundle, config, provider, say)
        opened.callback(runner.close)
        return runner, None
    from edgeinfer.memory_planner import resolve, to_request

    from ..engine.speculation.load import Draft

    assert isinstance(companion, Draft)  # a part of the model was refused for this device
    backends.check_draft(config, provider.device)
    planner, taken = backends.device_planner(as_stored(bundle), config, provider, config.kv)
    draft_planner, own = backends.draft_planner(planner, resolve(taken, bundle.config), as_stored(companion.bundle))
    draft_memory = draft_planner.plan(to_request(own))
    runner = backends.OnnxRunner(bundle, config, provider, say, draft_memory)
    opened.callback(runner.close)
    draft = backends.OnnxRunner(companion.bundle, own, provider, say, plan=draft_memory)
    runner.plan = runner.plan.with_draft(draft_memory)
    return runner, draft


def as_stored(bundle: Bundle) -> Graph:
    """Return the graph of a bundle without passes, as devices of onnxruntime take it."""
    from ..graph import build_graph, expected_types

    return build_graph(bundle.config, expected_types(bundle.types), Recipe(()))


def choice(bundle: Bundle, config: RuntimeConfig, max_kld: float | None,
           draft_memory: DraftMemory | None) -> Choice | None:
    """Choose how to run a bundle that has parts to choose from."""
    if not bundle.approximates:  # as nearly always: nothing is imported for it
        return None
    from .strategy import choose

    return choose(bundle, config, max_kld, draft_memory)
