"""The technique ``experts from flash``: a cache holds some experts, the others are read when a token needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeinfer.registry import NEVER, Technique

if TYPE_CHECKING:
    from edgeinfer.bundle import Bundle
    from edgeinfer.devices import DeviceProfile
    from edgeinfer.graph import ModelConfig
    from edgeinfer.memory_planner import MemoryPlan, Placer
    from edgeinfer.runtime import Session


def place(model: ModelConfig, bundle: Bundle | None) -> Placer | None:
    """Return the placer of slots for a model's experts; None if it has none."""
    if not model.experts:
        return None
    from .experts import keep_experts

    return keep_experts


def reads(plan: MemoryPlan, bundle: Bundle | None, profile: DeviceProfile) -> tuple[float, float] | None:
    """Return the bytes that a token reads of experts, and of one read; 0 for the latter counts as a long one."""
    from .experts import from_flash

    if not profile.storage_sequential_gbs or plan.experts is None:
        return None
    found = from_flash(plan.experts)
    return found.nbytes, found.read_bytes if profile.storage_random else 0


def attach(session: Session, settings: object) -> None:
    """Start the threads that read experts when a token needs them."""
    from edgeinfer.graph import ExpertsDown
    from edgeinfer.runtime import EXPERTS_KERNEL, read_on_demand

    instructions = session.program.instructions
    ranges = []
    for i, instruction in enumerate(instructions):
        if instruction.kernel == EXPERTS_KERNEL:
            last = max(j for j, other in enumerate(instructions)
                       if isinstance(other.op, ExpertsDown) and instruction.op
                       and other.op.layer == instruction.op.layer)
            ranges.append((i + 1, last + 1))
    assert session.plan.experts
    read_on_demand(session.executor, session.bundle, session.plan.experts, "experts", ranges)


def notice(plan: MemoryPlan) -> str:
    """Describe which experts are kept and which are read."""
    from edgeinfer.base.units import format_size

    experts = plan.experts
    assert experts
    return (f"{experts.slots} of {experts.total} experts are kept in memory ({experts.slots / experts.total:.0%}); "
            f"the others are read from storage on demand, {format_size(round(experts.expert_bytes))} each")


def cost(plan: MemoryPlan, tokens: int, hits: int, misses: int) -> dict[str, Any]:
    """Return the reads of tokens, as the field ``offload`` of reports."""
    assert plan.experts
    return {"decision": TECHNIQUE.name, "kept_share": plan.experts.slots / plan.experts.total,
            "hit_rate": hits / max(hits + misses, 1),
            "flash_bytes_per_token": misses * plan.experts.expert_bytes / max(tokens, 1)}


TECHNIQUE = Technique(name="experts from flash", kv=NEVER, place=place, reads=reads, attach=attach, notice=notice,
                      cost=cost)
