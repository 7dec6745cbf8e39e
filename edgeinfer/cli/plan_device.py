"""`edgeinfer plan --device cuda`: the regions of a run on onnxruntime, of this process and of its device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config import CUDA, Recipe, RuntimeConfig
from ..errors import BudgetError
from .on_gpu import gpu_here, speed_object
from .output import alternative_object, not_ours
from .plan_object import plan_fields

if TYPE_CHECKING:
    from ..memory_planner import MemoryPlan


def planned_on(device: str, name: str, stored: tuple[str | None, int | None], config: RuntimeConfig,
               kv: str | None) -> dict[str, Any]:
    """Return the JSON object of `plan` for a device of onnxruntime; nothing of it needs that package or a GPU.

    Raises `UsageError` for what the device cannot do.
    """
    from ..backends import PROVIDERS, DevicePlanner, device_config, longest_ctx, memory_of, most_sequences
    from ..describe import describe
    from ..memory_planner import default_ctx, default_threads, to_request

    provider = PROVIDERS[device]
    config = device_config(replace(config, kv=kv or provider.kv[0]), provider)
    model = describe(name, *stored, Recipe(()))
    own = model.config.max_position_embeddings
    config = replace(config, ctx=config.ctx or default_ctx(model.config), threads=config.threads or default_threads())
    planner = DevicePlanner(model.graph, provider, config.kv_layout)
    plan = planner.plan(to_request(config))
    host, memory = memory_of(provider, config)

    def fits(other: MemoryPlan) -> bool:
        return other.total_bytes <= host and (memory is None or other.device_bytes <= memory)

    options = [] if fits(plan) else list(planner.smaller(config, fits))
    gpu = gpu_here() if device == CUDA else None
    speed = gpu and speed_object(gpu, model.traffic(config.kv), config.ctx or 0, config.max_sequences)
    held = plan.region("kv").nbytes // (plan.kv_blocks * planner.positions(plan.request))
    report = {
        **plan_fields(model, config, plan, device, fits(plan), host,
                      "--budget" if config.budget_bytes else "what this system can give now"),
        "device_bytes": plan.device_bytes, "device_budget_bytes": memory,
        "max_ctx": longest_ctx(planner, config, fits, own), "max_ctx_from_storage": None,
        "max_sequences": None if device == CUDA and memory is None else most_sequences(planner, config, fits),
        "filed_bytes": 0, "kv_bytes_per_position": held, "kv_bytes_unshared": held,
        "alternatives": [alternative_object(option) for option in options], "file_types": None, "estimate": speed,
        "notes": [*_notes(device, memory, config, own), *([not_ours(speed, gpu)] if speed and gpu else [])],
        "neurons": None, "lazy": None, "windows": None, "decision": None,
    }
    if not report["fits"]:
        report["error"] = {"code": BudgetError.code, "message": planner.refusal(plan, host, memory, options)}
    return report


def _notes(device: str, memory: int | None, config: RuntimeConfig, own: int) -> list[str]:
    notes = []
    if device == CUDA:
        notes.append("What CUDA takes for itself is an estimate from documents; it was not measured yet.")
        if memory is None:
            notes.append("No GPU was found here, so that only this process's side is compared with what there is.")
    if (config.ctx or 0) > own:
        notes.append(f"The context of {config.ctx} tokens is longer than the model's {own}: run refuses it.")
    return notes
