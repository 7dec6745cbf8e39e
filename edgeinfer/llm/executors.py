"""Executor of a model on a device, and its memory there: shared by `plan`, `estimate`, `run` and `LLM`.

None of the commands decides this by itself, so their answers agree.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from edgeinfer import devices

from .. import backends
from ..base.process import say
from ..config import AUTO, CUDA, Recipe, RuntimeConfig
from ..errors import BudgetError, UnsupportedModelError, UsageError
from ..registry import placer, technique

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic
    from edgeinfer.memory_planner import MemoryPlan, Planner

    from ..backends import DevicePlanner, OnCard, Provider
    from ..bundle import Bundle
    from ..graph import Graph
    from ..models.description import ModelDescription


class Executor(NamedTuple):
    """Executor of a model."""

    config: RuntimeConfig
    """The settings of the run as it takes them."""
    planner: DevicePlanner | None = None
    """Planner of a run on onnxruntime; None if our own kernels run the model."""
    profile: DeviceProfile | None = None
    """The card that was asked about, as edgeinfer uses it; None for other devices."""
    refused: str = ""
    """Explain why CUDA does not run the model, or not with these settings; empty if it does or was not requested."""

    @property
    def provider(self) -> Provider | None:
        """The execution provider; None: our own kernels."""
        return self.planner.provider if self.planner else None

    def on_card(self, model: ModelDescription, ctx: int) -> OnCard | None:
        """Return the run on the card that was asked about, with a context; None if there is none, or not by CUDA."""
        if not (self.planner and self.profile):
            return None
        config = replace(self.config, ctx=ctx, threads=1)
        return backends.OnCard(self.planner, config, model.traffic(config.kv))


def executor_on(provider: Provider, graph: Graph, config: RuntimeConfig, kv: str | None = None,
                instead: bool = False) -> Executor:
    """Return a provider as the executor of a model.

    Parameters
    ----------
    provider : Provider
    graph : Graph
        Without passes.
    config : RuntimeConfig
    kv : str, optional
        Type of the KV cache, where one was requested.
    instead : bool
        True if our own kernels run models that the provider refuses.

    Raises
    ------
    UsageError, UnsupportedModelError
        The provider refuses the settings or the model, and nothing else is to run it.
    """
    try:
        planner, taken = backends.device_planner(graph, config, provider, kv)
    except (UsageError, UnsupportedModelError) as why:
        if not instead:
            raise
        return Executor(config, refused=str(why))
    return Executor(taken, planner)


def executor_of(card: DeviceProfile, graph: Graph, config: RuntimeConfig, kv: str | None = None) -> Executor:
    """Return the executor of a model on a device with a profile:

    CUDA on NVIDIA's cards, if it accepts model and settings.
    """
    if (profile := devices.served(card)) is None:
        return Executor(config)
    found = executor_on(backends.PROVIDERS[CUDA], graph, config, kv, instead=True)
    return found._replace(profile=profile) if found.planner else found


def executor_here(device: str, provider: Provider, graph: Graph, config: RuntimeConfig,
                  kv: str | None = None) -> Executor:
    """Return the executor of a model on this machine; with device auto, our own kernels if CUDA cannot run it, with a
    note.
    """
    found = executor_on(provider, graph, config, kv, instead=device == AUTO)
    if device == AUTO:
        say(f"Device auto took cpu, our own kernels: {found.refused}" if found.refused
            else f"Device auto took {provider.device}.")
    return found


def settled(device: str | None, provider: Provider, bundle: Bundle, config: RuntimeConfig,
            kv: str | None) -> tuple[Provider | None, RuntimeConfig]:
    """Return the executor of a bundle on this machine, None for our own kernels, and the settings that it accepts.

    Raises as `executor_on`.
    """
    from ..graph import build_graph, expected_types

    graph = build_graph(bundle.config, expected_types(bundle.types), Recipe(()))
    found = executor_here(str(device), provider, graph, config, kv)
    return found.provider, found.config


# -- memory of our own kernels -----------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """Plan of a run on our own kernels within a budget."""

    plan: MemoryPlan
    """Plan of the run; if none fits, the one that was requested."""
    refused: BudgetError | None = None
    """Reason for the refusal, as `run` prints it, with alternatives that fit."""

    @property
    def mode(self) -> str:
        """Residency of the weights during the run, or ``refused``."""
        return "refused" if self.refused else self.plan.mode


def fitted(model: ModelDescription, planner: Planner, config: RuntimeConfig,
           device: DeviceProfile | None = None) -> Fitted:
    """Return the plan or device plan of a run within its budget.

    Parameters
    ----------
    model : ModelDescription
    planner : Planner
        Of its graph.
    config : RuntimeConfig
        Without open fields, the budget included.
    device : DeviceProfile, optional
        That it runs on; by default this machine, whose own profile decides which layers of a bundle leave out neurons.
    """
    from edgeinfer.memory_planner import fit

    from ..bundle import Bundle

    try:
        if device and device.own_memory:
            return Fitted(_on_card(model, planner, config))
        if model.bundle is None:
            return Fitted(_planned(model, planner, config))
        from ..runtime import plan_run

        with Bundle.open(model.bundle) as bundle:
            if device is None and (config.ctx or 0) <= model.config.max_position_embeddings:  # else run refuses
                return Fitted(plan_run(bundle, config, placer(bundle.config, bundle), planner.draft_memory).plan)
            return Fitted(fit(planner, config, model.rebuild, placer(bundle.config, bundle))[0])
    except BudgetError as error:
        plan: MemoryPlan = error.plan  # type: ignore[assignment]
        return Fitted(plan, error)


def _planned(model: ModelDescription, planner: Planner, config: RuntimeConfig) -> MemoryPlan:
    """Plan a run of a model that is no bundle yet, as `plan_run` will; raises as it does."""
    from edgeinfer.memory_planner import Planner, fit

    from ..graph import build_graph, expected_types, without_approximations

    def exactly(exact: RuntimeConfig) -> MemoryPlan:
        graph = build_graph(model.config, expected_types(model.graph.types), exact.recipe)
        return _planned(replace(model, graph=graph, recipe=exact.recipe),
                        Planner(graph, model.weight_bytes, draft_memory=planner.draft_memory), exact)

    try:
        return fit(planner, config, model.rebuild, placer(model.config))[0]
    except BudgetError as error:
        if without_approximations(config.recipe) == config.recipe:  # as mostly: nothing is imported for it
            raise
        from ..runtime import or_exact

        raise or_exact(error, config, exactly) from None


def placed(model: ModelDescription, planner: Planner, config: RuntimeConfig,
           device: DeviceProfile | None = None) -> MemoryPlan | None:
    """Return the plan of a run within its budget as `fitted` does, without alternatives; None if none fits.
    """
    from edgeinfer.memory_planner import fitting, to_request

    from ..bundle import Bundle

    budget = int(config.budget_bytes or 0)
    if device and device.own_memory:
        plan = planner.plan(to_request(config))
        return plan if plan.total_bytes <= budget else None
    if model.bundle is None:
        return fitting(planner, config, budget, placer(model.config))
    with Bundle.open(model.bundle) as bundle:
        return fitting(planner, config, budget, placer(bundle.config, bundle))


def stored_traffic(model: ModelDescription, plan: MemoryPlan, profile: DeviceProfile, kv: str) -> Traffic | None:
    """Return the traffic of a token on a device, including reads from storage.

    None if that depends on figures of the storage that were not measured.
    """
    traffic = model.traffic(kv)
    if plan.parts:
        return replace(traffic, streamed_bytes=plan.streamed_bytes, prompt_stored_bytes=plan.streamed_bytes) \
            if profile.storage_sequential_gbs else None
    if not (one := technique(plan.technique)):
        return traffic
    from ..bundle import Bundle

    with Bundle.open(model.bundle) if model.bundle else nullcontext() as bundle:
        found = one.reads(plan, bundle, profile)
    if found is None:
        return None
    missing = (plan.experts.total - plan.experts.slots) * plan.experts.expert_bytes if plan.experts else 0.0
    return replace(traffic, flash_bytes=found[0], flash_chunk_bytes=found[1], prompt_stored_bytes=missing)


def _on_card(model: ModelDescription, planner: Planner, config: RuntimeConfig) -> MemoryPlan:
    """Return the plan with all weights in a card's memory; raises `BudgetError`."""
    from edgeinfer.memory_planner import alternatives, fill_budget, pool_error, refusal

    budget = int(config.budget_bytes or 0)
    if error := pool_error(planner.plan, config, budget):
        raise error
    plan = fill_budget(planner.plan, config, lambda plan: plan.total_bytes <= budget)
    if plan.total_bytes <= budget:
        return plan
    options = list(alternatives(planner, config, budget, model.rebuild))
    raise BudgetError(refusal(plan, budget, options), plan, budget, tuple(options))
