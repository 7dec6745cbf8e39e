"""Threads that read weights of a session from storage while tokens are generated, and the instructions they follow."""

from __future__ import annotations

from edgeinfer.bundle import Bundle, read_cold
from edgeinfer.memory_planner import ColdPlan, ExpertsPlan, MemoryPlan

from ..execution.executor import Executor
from ..planning import offsets_of
from ..program.lowering.base import RELEASE_KERNEL
from .direct import File
from .slots import Slots
from .stream import Stream


def read_layers(executor: Executor, bundle: Bundle, plan: MemoryPlan) -> None:
    """Start the threads that read streamed weights ahead of use."""
    state = bundle.weights_state
    ends = [i for i, instruction in enumerate(executor.program.instructions) if instruction.kernel == RELEASE_KERNEL]
    executor.read_with(Stream(plan, executor.regions["streamed"], File.open(bundle.weights_path, state), state,
                              offsets_of(bundle), ends, executor.events, executor.kernels, executor.pool.words))


def read_on_demand(executor: Executor, bundle: Bundle, plan: ColdPlan | ExpertsPlan, region: str,
                   ranges: list[tuple[int, int]]) -> None:
    """Start the threads that read weights when a token needs them.

    Parameters
    ----------
    executor : Executor
    bundle : Bundle
    plan : ColdPlan or ExpertsPlan
        Cold neurons are read from their own file, experts from that of the weights.
    region : name of the region of their slots
    ranges : of int
        First instruction that waits for them, and the one after the last, for each layer.
    """
    cold = read_cold(bundle) if isinstance(plan, ColdPlan) else None
    path, state = (cold.path, bundle.state(cold.path.name)) if cold else (bundle.weights_path, bundle.weights_state)
    executor.read_with(Slots(plan, cold, executor.regions[region], File.open(path, state), state, ranges,
                             executor.events, executor.kernels, executor.pool.words))
