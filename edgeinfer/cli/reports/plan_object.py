"""A plan as `edgeinfer plan` reports it: its JSON object, alternatives that fit, its speed, remarks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...config import RuntimeConfig
from ...errors import BudgetError
from ...registry import Reported, in_use, prompt_share, reports, settled
from ..lengths import beyond
from ..output import REFUSED, alternative_object, not_ours
from .on_gpu import PROMPT, speed_object

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile
    from edgeinfer.memory_planner import Alternative, DraftMemory, MemoryPlan

    from ...llm.strategy import Choice, Strategy
    from ...models.description import ModelDescription

MAX_THREADS = 256
DEVICE_MEMORY, SYSTEM_MEMORY = "memory of", "free on this machine now"


def plan_fields(model: ModelDescription, config: RuntimeConfig, plan: MemoryPlan, device: str | None,
                fits: bool | None, budget: int | None, budget_source: str | None) -> dict[str, Any]:
    """Return the common beginning of the JSON objects of plans: the model, the request, where memory goes, the
    budget."""
    return {
        "model": model.name, "source": model.source, "fits": fits, "mode": plan.mode,
        "parameters": model.parameters, "weights": model.quantisation.weights,
        "group_size": model.quantisation.group_size, "ctx": config.ctx, "kv": config.kv, "threads": config.threads,
        "device": device,
        "regions": [{"name": r.name, "bytes": r.nbytes, "kind": r.kind, "reason": r.reason} for r in plan.regions],
        "total_bytes": plan.total_bytes, "resident_bytes": plan.resident_bytes, "mapped_bytes": plan.mapped_bytes,
        "reclaimable_bytes": plan.reclaimable_bytes, "budget_bytes": budget, "budget_source": budget_source,
        "unstreamed_bytes": plan.unstreamed_bytes,
        "remaining_bytes": None if budget is None else budget - plan.total_bytes,
        "model_ctx": model.config.max_position_embeddings,
        "pure_weight_bytes": round(model.pure_weight_bytes(4)),
    }


def share(config: RuntimeConfig) -> str:
    """Return how much of memory without a given limit a run may take; empty for all."""
    from edgeinfer.memory_planner import fills

    return "nine tenths of what is " if fills(config) else ""


class PlanReport:
    """One plan, its request, and alternatives that fit."""

    def __init__(self, model: ModelDescription, config: RuntimeConfig, device: DeviceProfile | None,
                 profile: DeviceProfile | None, choice: Choice | None, draft_memory: DraftMemory | None = None,
                 refused: str = ""):
        from edgeinfer.memory_planner import Planner, default_ctx, default_threads

        from ...llm.executors import Fitted, fitted

        threads = config.threads or (threads_on(device) if device else default_threads())
        self.model, self.device, self.profile, self.choice, self.refused = model, device, profile, choice, refused
        self.config = replace(config, ctx=config.ctx or default_ctx(model.config), threads=threads)
        self.budget, self.budget_source = self._limit()
        self.planner = Planner(model.graph, model.weight_bytes, draft_memory=draft_memory)
        self.within = replace(self.config, budget_bytes=self.budget)
        self.fitted = Fitted(choice.strategy.plan) if choice else fitted(model, self.planner, self.within, device)

    def _limit(self) -> tuple[int, str]:
        from edgeinfer.memory_planner import budget_of

        if self.config.budget_bytes is not None:
            return self.config.budget_bytes, "--budget"
        if self.device is not None:
            return self.device.usable_bytes, f"{DEVICE_MEMORY} {self.device.titled}"
        return budget_of(self.config), f"{share(self.config)}{SYSTEM_MEMORY}"

    def report(self) -> dict[str, Any]:
        """Return the JSON object."""
        from edgeinfer.kernels import abi
        from edgeinfer.memory_planner import RESIDENT, alternatives

        from .neurons import neurons_object
        from .serving import serving_object
        from .state import state_object
        from .windows import windows_object

        (plan, refused), config, model = self.fitted, self.config, self.model
        mode = self.fitted.mode
        stored = None if mode in (RESIDENT, REFUSED) else self._from_storage(plan)
        options: list[Alternative] = list(refused.alternatives) if refused else []  # type: ignore[arg-type]
        if stored:
            options = [*alternatives(self.planner, config, self.budget, model.rebuild), stored]
        offers = [self._alternative(option) for option in options]
        report = {
            **plan_fields(model, config, plan, self.device.name if self.device else None, refused is None, self.budget,
                          self.budget_source),
            "mode": mode, "from_storage": offers[-1] if stored else None,
            "max_ctx": self._longest(plan),
            "max_ctx_from_storage": self._longest_from_storage(options),
            "kv_bytes_per_position": model.kv_bytes_per_position[config.kv],
            "kv_bytes_unshared": model.kv_bytes_unshared[config.kv], "filed_bytes": plan.filed_bytes,
            "alternatives": offers, "file_types": model.file_types or None,
            "estimate": (found := self._estimate(stored is not None)), "notes": self._notes(found),
            "neurons": neurons_object(model, self.profile),
            **reports(Reported("plan", config, model=model, prompt=self._prompt)), "windows": windows_object(plan),
            "state": state_object(plan, self.planner.graph, model.kv_bytes_per_position[config.kv]),
            "serving": serving_object(plan, abi.BLOCK_TOKENS) if config.fill_budget else None,
        }
        if refused:
            report["error"] = {"code": BudgetError.code, "message": str(refused)}
        return report

    def _longest(self, plan: MemoryPlan) -> int:
        """Return the largest context that fits, in the KV pool too if its size was given."""
        from edgeinfer.memory_planner import largest_ctx, own_pool

        found = largest_ctx(self.planner, self.config, self.budget, self.model.config.max_position_embeddings)
        return min(found, int(plan.request.kv_tokens or 0)) if own_pool(self.config) else found

    def _from_storage(self, plan: MemoryPlan) -> Alternative:
        """Return the reads of the run from storage."""
        from edgeinfer.memory_planner import cold, kept_experts, streamed
        from edgeinfer.offload import from_flash

        if plan.cold:
            return cold(plan, next((strategy.read_bytes for strategy in self._flash()), 0.0))
        return kept_experts(plan, from_flash(plan.experts).nbytes) if plan.experts else streamed(plan)

    def _flash(self) -> list[Strategy]:
        """The way with this recipe that reads cold neurons from storage, where `run` has one."""
        strategies = (self.choice.strategy, *self.choice.others) if self.choice else ()
        return [strategy for strategy in strategies if strategy.plan.cold
                and strategy.config.recipe == self.config.recipe]

    def _longest_from_storage(self, options: list[Alternative]) -> int | None:
        """Return the largest context with weights read from storage, as the last alternative has them, if one does."""
        from edgeinfer.memory_planner import largest_ctx, stream
        from edgeinfer.offload import keep_experts

        placers = {"kept_experts": keep_experts, "streamed_layers": stream}
        found = [placer for name, placer in placers.items() if any(name in option.options for option in options)]
        return largest_ctx(self.planner, self.config, self.budget, self.model.config.max_position_embeddings,
                           placer=found[0]) if found else None

    def _read_of_experts(self, option: Alternative) -> dict[str, Any]:
        """Return the reads of experts by tokens, and their speed if storage was measured."""
        from edgeinfer.devices import estimate
        from edgeinfer.offload import ALIKE, SKEWED, from_flash

        plan, found = self.fitted.plan, {}
        assert plan.experts
        for name, half in (("alike", ALIKE), ("skewed", SKEWED)):
            expected, speed = from_flash(plan.experts, half), None
            if self.profile is not None and self.profile.storage_sequential_gbs:
                traffic = replace(self.model.traffic(self.config.kv), flash_bytes=expected.nbytes,
                                  flash_chunk_bytes=expected.read_bytes if self.profile.storage_random else 0)
                speed = estimate(self.profile, traffic, self.config.ctx or 0).decode_tok_per_s
            found[name] = {"busier_half": half, "hit_rate": expected.hit_rate, "streamed_bytes": round(expected.nbytes),
                           "decode_tok_per_s": speed}
        return {"experts": plan.experts.total, "streamed_bytes": option.streamed_bytes, "routing": found,
                "decode_tok_per_s": found["alike"]["decode_tok_per_s"]}

    def _alternative(self, option: Alternative) -> dict[str, Any]:
        """Return an alternative as a JSON object; how fast reading from storage is, where storage was measured."""
        from edgeinfer.devices import estimate

        out, speed = alternative_object(option), None
        if "cold_neurons" in option.options:
            speed = next((strategy.at_depth(self.config.ctx or 0) for strategy in self._flash()), None)
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

    def _estimate(self, stored: bool) -> dict[str, Any] | None:
        """Return the speed with a full context, and with an empty one; None if this machine was not probed.

        Of weights that are read from storage it counts the reading, where storage was measured; else it is that with
        all in memory.
        """
        from ...llm.executors import stored_traffic

        if self.profile is None:
            return None
        kv = self.config.kv
        used = settled(in_use(self.config), self.model.layers)
        traffic = stored_traffic(self.model, self.fitted.plan, self.profile, kv)
        found = speed_object(self.profile, traffic or self.model.traffic(kv), self.config.ctx or 0, 1,
                             prompt_share(used, self._prompt, 0, self.model.layers))
        return {**found, "reading": traffic is not None if stored else None}

    @property
    def _prompt(self) -> int:
        """Tokens of the prompt that is predicted."""
        return min(PROMPT, self.config.ctx or 0)

    def _notes(self, found: dict[str, Any] | None) -> list[str]:
        notes, own = [], self.model.config.max_position_embeddings
        if self.model.file_note:
            notes.append(self.model.file_note)
        placed = next((strategy.sparse for strategy in self._flash()), self.model.sparse)
        if placed and (said := placed.sentence()):
            notes.append(said[0].upper() + said[1:])
        if placed and self.model.sparse and placed.runs != self.model.sparse.runs:
            notes.append("Where neurons are read from storage, no layer falls back to dense or exact, because masks "
                         "decide that.")
        notes += beyond(self.config.ctx or 0, own)
        if found and self.profile and (remark := not_ours(found, self.profile, self.refused)):
            notes.append(remark)
        if self.profile is None:
            notes.append("To estimate the speed, measure this machine once with 'edgeinfer devices --probe', or name "
                         "another with --machine.")
        elif self.profile.cores != self.config.threads and (self.device is None or self.profile.isa in _our_isas()):
            notes.append(f"The speed is that of {self.profile.cores} threads on {self.profile.name}, not of "
                         f"{self.config.threads}.")
        if self.budget_source.startswith(DEVICE_MEMORY) and self.device:
            notes.append(self._which_version(self.device))
        if any(region.kind == "mapped" for region in self.fitted.plan.regions):
            notes.append("Weights are mapped from their file, so the system may evict them when memory is short and "
                         "read them again; --mlock prevents that.")
        return notes


    def _which_version(self, device: DeviceProfile) -> str:
        """Return the part of the device's memory that is the budget, and the smaller version that would suffice."""
        left = device.memory_bytes - device.usable_bytes
        room = f", less {format_size(left)} for the system" if left else ""
        needed = self.fitted.plan.unstreamed_bytes
        enough = next((f"; {gib} GB is enough" for gib in sorted(device.memory_gib) if gib << 30 != device.memory_bytes
                       and needed <= replace(device, memory_bytes=gib << 30).usable_bytes), "")
        exist = (f" The name states no memory, so this is the smallest common version; it is sold with "
                 f"{', '.join(map(str, sorted(device.memory_gib)))} GB{enough}.") if len(device.memory_gib) > 1 else ""
        return f"The budget is the memory of {device.titled}{room}; --budget sets another.{exist}"


def threads_on(device: DeviceProfile) -> int:
    """Return the threads on a device: its processor cores; a GPU's multiprocessors run none."""
    return min(device.cores, MAX_THREADS) if device.isa in _our_isas() else 1


def _our_isas() -> set[str]:
    """Return the instruction sets of processors on which threads of ours run."""
    from edgeinfer.kernels import ISA_LEVELS

    return {isa.name for isa in ISA_LEVELS}
