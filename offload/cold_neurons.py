"""The technique ``sparse from flash``: hot neurons stay in memory, masks name the others that are read from storage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from edgeinfer.registry import NEVER, Technique

if TYPE_CHECKING:
    from edgeinfer.bundle import Bundle
    from edgeinfer.devices import DeviceProfile
    from edgeinfer.graph import ModelConfig
    from edgeinfer.memory_planner import MemoryPlan, Placer
    from edgeinfer.runtime import Session


def place(model: ModelConfig, bundle: Bundle | None) -> Placer | None:
    """Return the placer of hot and cold neurons for a bundle; None if it has no cold ones."""
    if bundle is None or "cold" not in bundle.parts:
        return None
    from .placement import place_neurons

    return partial(place_neurons, bundle)


def reads(plan: MemoryPlan, bundle: Bundle | None, profile: DeviceProfile) -> tuple[float, float] | None:
    """Return the bytes that a token reads of cold neurons, and of one read."""
    if bundle is None or not profile.storage_random:
        return None
    from .prediction import cold_reads

    assert plan.cold
    return cold_reads(bundle, plan.cold), plan.cold.cluster_bytes


def attach(session: Session, settings: object) -> None:
    """Start the threads that read neurons when a token needs them."""
    from edgeinfer.graph import NeuronDown
    from edgeinfer.kernels import abi
    from edgeinfer.runtime import RESOLVE_KERNEL, read_on_demand

    instructions = session.program.instructions
    found = [i for i, instruction in enumerate(instructions)
             if instruction.kernel == RESOLVE_KERNEL and not instruction.flags & abi.FLAG_EARLY]
    ranges = [(i + 1, next(j for j in range(i, len(instructions)) if isinstance(instructions[j].op, NeuronDown)) + 1)
              for i in found]
    assert session.plan.cold
    read_on_demand(session.executor, session.bundle, session.plan.cold, "cold", ranges)


def notice(plan: MemoryPlan) -> str:
    """Describe which neurons are in memory and which are read."""
    from edgeinfer.base.units import format_size

    assert plan.cold
    return (f"{_hot(plan):.0%} of the FFNs' neurons are in memory; the others are read from storage on demand, "
            f"{format_size(plan.cold.cluster_bytes)} at a time, of which {plan.cold.slots} are kept")


def cost(plan: MemoryPlan, tokens: int, hits: int, misses: int) -> dict[str, Any]:
    """Return the reads of tokens, as the field ``offload`` of reports."""
    assert plan.cold
    return {"decision": TECHNIQUE.name, "hot_share": _hot(plan), "hit_rate": hits / max(hits + misses, 1),
            "flash_bytes_per_token": misses * plan.cold.cluster_bytes / max(tokens, 1)}


def _hot(plan: MemoryPlan) -> float:
    """Return the share of the neurons that is in memory."""
    assert plan.cold
    return sum(plan.cold.hot) / (plan.cold.neurons * len(plan.cold.hot))


TECHNIQUE = Technique(name="sparse from flash", kv=NEVER, place=place, reads=reads, attach=attach, notice=notice,
                      cost=cost)
