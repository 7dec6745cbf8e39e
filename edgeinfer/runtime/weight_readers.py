"""Which threads read weights of a session from storage while tokens flow, and behind which records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.bundle import read_cold
from edgeinfer.memory_planner import ColdPlan, ExpertsPlan

from .direct import File
from .planning import offsets_of
from .slots import Slots
from .stream import RELEASE_KERNEL, Stream

if TYPE_CHECKING:
    from .session import Session


def read_layers(session: Session) -> None:
    """Start the threads that read streamed weights ahead of use, where the plan streams any."""
    if not session.plan.parts:
        return
    executor, state = session.executor, session.bundle.weights_state
    ends = [i for i, record in enumerate(session.program.records) if record.kernel == RELEASE_KERNEL]
    executor.read_with(Stream(session.plan, executor.regions["streamed"], File.open(session.bundle.weights_path, state),
                              state, offsets_of(session.bundle), ends, executor.tickets, executor.kernels,
                              executor.pool.words))


def read_on_demand(session: Session, plan: ColdPlan | ExpertsPlan, region: str, ranges: list[tuple[int, int]]) -> None:
    """Start the threads that read weights when a token wants them.

    Parameters
    ----------
    session : Session
    plan : ColdPlan or ExpertsPlan
        Cold neurons are read from their own file, experts from that of the weights.
    region : name of the region of their slots
    ranges : of int
        First record that waits for them, and the one behind the last, for each layer.
    """
    executor, bundle = session.executor, session.bundle
    cold = read_cold(bundle) if isinstance(plan, ColdPlan) else None
    path, state = (cold.path, bundle.state(cold.path.name)) if cold else (bundle.weights_path, bundle.weights_state)
    executor.read_with(Slots(plan, cold, executor.regions[region], File.open(path, state), state, ranges,
                             executor.tickets, executor.kernels, executor.pool.words))
