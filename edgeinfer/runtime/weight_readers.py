"""Which threads read weights of a session from storage while tokens flow, and behind which records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Cold
from edgeinfer.graph import ExpertsDown, NeuronDown
from edgeinfer.kernels import abi

from .direct import File
from .planning import offsets_of
from .slots import EXPERTS_KERNEL, RESOLVE_KERNEL, Slots
from .stream import RELEASE_KERNEL, Stream

if TYPE_CHECKING:
    from .session import Session


def read_weights(session: Session, regions: Mapping[str, NDArray[np.uint8]], cold: Cold | None) -> None:
    """Start the threads that read what the plan does not keep in memory."""
    if session.plan.parts:
        _read_layers(session, regions["streamed"])
    if cold:
        _read_neurons(session, regions["cold"], cold)
    if session.plan.experts:
        _read_experts(session, regions["experts"])


def _read_layers(session: Session, region: NDArray[np.uint8]) -> None:
    """Start the threads that read streamed weights ahead of use."""
    executor, state = session.executor, session.bundle.weights_state
    ends = [i for i, record in enumerate(session.program.records) if record.kernel == RELEASE_KERNEL]
    executor.read_with(Stream(session.plan, region, File.open(session.bundle.weights_path, state), state,
                               offsets_of(session.bundle), ends, executor.tickets, executor.kernels,
                               executor.pool.words))


def _read_neurons(session: Session, region: NDArray[np.uint8], cold: Cold) -> None:
    """Start the threads that read neurons when a token wants them."""
    executor, state, plan = session.executor, session.bundle.state(cold.path.name), session.plan.cold
    assert plan
    records = session.program.records
    found = [i for i, record in enumerate(records)
             if record.kernel == RESOLVE_KERNEL and not record.flags & abi.FLAG_EARLY]
    ranges = [(i + 1, next(j for j in range(i, len(records)) if isinstance(records[j].op, NeuronDown)) + 1)
              for i in found]
    executor.read_with(Slots(plan, cold, region, File.open(cold.path, state), state, ranges, executor.tickets,
                             executor.kernels, executor.pool.words))


def _read_experts(session: Session, region: NDArray[np.uint8]) -> None:
    """Start the threads that read experts when a token wants them."""
    executor, state, records = session.executor, session.bundle.weights_state, session.program.records
    assert session.plan.experts
    ranges = []
    for i, record in enumerate(records):
        if record.kernel == EXPERTS_KERNEL:
            last = max(j for j, other in enumerate(records)
                       if isinstance(other.op, ExpertsDown) and record.op and other.op.layer == record.op.layer)
            ranges.append((i + 1, last + 1))
    executor.read_with(Slots(session.plan.experts, None, region, File.open(session.bundle.weights_path, state), state,
                             ranges, executor.tickets, executor.kernels, executor.pool.words))
