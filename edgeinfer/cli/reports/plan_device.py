"""`edgeinfer plan --device cuda`, or of an NVIDIA card: the regions of a run on onnxruntime, of process and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import backends
from ...config import CUDA, RuntimeConfig
from ...errors import BudgetError
from ...registry import Reported, reports
from ..lengths import beyond
from ..output import alternative_object
from .on_gpu import gpu_here, remark, speed_object
from .plan_object import DEVICE_MEMORY, SYSTEM_MEMORY, plan_fields, share
from .serving import serving_object
from .state import device_state

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile
    from edgeinfer.memory_planner import MemoryPlan

    from ...backends import DevicePlanner
    from ...llm.executors import Executor
    from ...models.description import ModelDescription
    from ...registry import Drafting


def planned_on(found: Executor, model: ModelDescription, drafting: Drafting | None = None) -> dict[str, Any]:
    """Return the JSON object of `plan` for a device of onnxruntime; nothing of it needs that package or a GPU.

    Raises `UsageError` for options that the device does not support.
    """
    from edgeinfer.memory_planner import fills, pool_error, serving_share

    card, planner = found.profile, found.planner
    assert planner
    device = planner.provider.device
    if drafting:
        drafting.check_device(device, bool(model.config.recurrent))
    drafted = drafting.model if drafting else None
    config = _settled(found, model, bool(drafted))
    host, memory = backends.memory_of(planner.provider, config) if not card else \
        (config.budget_bytes, serving_share(card.memory_bytes) if fills(config) else card.memory_bytes)
    draft_plan = _drafted(drafted, model, planner, config) if drafted else None

    def fits(other: MemoryPlan) -> bool:
        return backends.device_fits(other.with_draft(draft_plan) if draft_plan else other, host, memory)

    alone, error = backends.fill_device(planner, config, fits), pool_error(planner.plan, config, host)
    plan = alone.with_draft(draft_plan) if draft_plan else alone
    unknown, fitting = device == CUDA and memory is None, fits(alone) and not error
    options = [] if fits(alone) else list(backends.smaller(planner, config, fits))
    speed, remarks = _speed(card, planner, model, config)
    held = alone.region("kv").nbytes // ((alone.kv_blocks + planner.spare) * planner.positions(alone.request))
    report = {
        **plan_fields(model, config, plan, card.name if card else device, None if unknown and fitting else fitting,
                      host, _source(config, card)),
        "device_bytes": plan.device_bytes, "device_budget_bytes": memory,
        "device_budget_source": _device_source(config, card, unknown),
        **_largest(planner, config, alone, fits, unknown), "max_ctx_from_storage": None, "filed_bytes": 0,
        "kv_bytes_per_position": held, "kv_bytes_unshared": held,
        "alternatives": [alternative_object(option) for option in options], "file_types": model.file_types or None,
        "estimate": speed, "notes": [*_notes(device, card, memory, config, model), *remarks],
        "neurons": None, **reports(Reported("plan", found.config, model=model)),
        "windows": None, "state": device_state(planner, model.graph, alone, held), "decision": None,
        "from_storage": None,
        "serving": serving_object(alone, planner.positions(alone.request)) if found.config.fill_budget else None,
    }
    if report["fits"] is False:
        said = str(error) if error else planner.refusal(plan, host, memory, options)
        report["error"], report["mode"] = {"code": BudgetError.code, "message": said}, "refused"
    return report


def _settled(found: Executor, model: ModelDescription, drafted: bool) -> RuntimeConfig:
    """Return the settings with which `serve` opens the model on this device."""
    from edgeinfer.memory_planner import default_ctx, default_threads

    config = found.config
    return replace(config, ctx=config.ctx or default_ctx(model.config),
                   threads=config.threads or (1 if found.profile else default_threads()),
                   fill_budget=config.fill_budget and not drafted)


def _speed(card: DeviceProfile | None, planner: DevicePlanner, model: ModelDescription,
           config: RuntimeConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the estimate for the card, or the GPU that is here, with a remark on it; None if there is none."""
    from edgeinfer.memory_planner import to_request

    gpu = card or (gpu_here() if planner.provider.device == CUDA else None)
    if gpu is None:
        return None, []
    sizes = planner.lower(to_request(config))
    traffic = sizes.traffic(model.traffic(config.kv), config.kv)
    speed = speed_object(gpu, traffic, config.ctx or 0, config.max_sequences)
    return speed, [remark(speed, gpu, sizes)]


def _device_source(config: RuntimeConfig, card: DeviceProfile | None, unknown: bool) -> str | None:
    """Return where the limit of the device's memory comes from."""
    if card:
        return f"{'nine tenths of the ' if share(config) else ''}{DEVICE_MEMORY} {card.title}"
    return None if unknown else f"{share(config) or 'what is '}free of it"


def _source(config: RuntimeConfig, card: DeviceProfile | None) -> str | None:
    """Return where the limit of the process comes from."""
    return "--budget" if config.budget_bytes else None if card else f"{share(config)}{SYSTEM_MEMORY}"


def _largest(planner: DevicePlanner, config: RuntimeConfig, plan: MemoryPlan, fits: Callable[[MemoryPlan], bool],
             unknown: bool) -> dict[str, Any]:
    """Return the fields of the longest context, and of the most sequences of the context requested."""
    from edgeinfer.memory_planner import own_pool

    own = planner.config.max_position_embeddings
    pool = int(plan.request.kv_tokens or 0) if own_pool(config) else None
    ctx, config = int(config.ctx or 0), replace(config, fill_budget=False)
    longest = min(backends.longest_ctx(planner, config, fits, own), own if pool is None else pool)
    most = None if unknown else backends.most_sequences(planner, config, fits) if pool is None else min(pool // ctx, 64)
    return {"max_ctx": longest, "max_sequences": most}


def _drafted(name: str, target: ModelDescription, planner: DevicePlanner, config: RuntimeConfig) -> MemoryPlan:
    """Return the plan of a draft model on the same device, as a run has it beside the model."""
    from edgeinfer.memory_planner import to_request

    from ...config import Recipe
    from ...engine.speculation.load import check_described
    from ...models.describe import describe

    model = describe(name, recipe=Recipe(()))
    check_described(model, target, config)
    draft, own = backends.draft_planner(planner, config, model.graph)
    return draft.plan(to_request(own))


def _notes(device: str, card: DeviceProfile | None, memory: int | None, config: RuntimeConfig,
           model: ModelDescription) -> list[str]:
    notes, own = [], model.config.max_position_embeddings
    if device == CUDA:
        notes.append("CUDA's own memory was measured on an H100 and an H200; other cards may take less.")
        if memory is None:
            notes.append("No GPU was found here: only this process's side is compared with the available memory, and "
                         "run is refused. Give a card's name to plan for it, such as --machine rtx4090.")
        if model.config.recurrent:
            notes.append(backends.UNTRIED_STATES)
    elif not card and (why := backends.why_not(device)):
        notes.append(f"run is refused here: {why}")
    if card and config.budget_bytes is None:
        notes.append("The memory of the machine around the card is not known: set it with --budget.")
    return [*notes, *beyond(config.ctx or 0, own)]
