"""Neurons and experts that are read when a token needs them: their cache, and the threads that read.

The inner half is kernels/ops/neuron_ffn/neuron_resolve.py or experts_resolve.py, which fills the cache, and
kernels/ops/stream.py, which reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import EdgeInferError
from edgeinfer.kernels import Kernels, abi
from edgeinfer.memory_planner import READERS, ColdPlan, ExpertsPlan

from .direct import File
from .readers import NAP_SECONDS, Readers

if TYPE_CHECKING:
    from edgeinfer.bundle import Cold

_EARLY, _LEFT = abi.COLD_EARLY >> 3, abi.PART_LEFT >> 3
_FAILED, _NEXT, _RELEASED = (offset >> 3 for offset in (abi.STREAM_FAILED, abi.STREAM_NEXT, abi.STREAM_RELEASED))


class Hits(NamedTuple):
    """Cache hits and misses of decoded tokens so far."""

    tokens: int

    hits: int
    """Clusters, or experts, that were wanted and in the cache."""
    misses: int
    """Number of those that had to be read."""


class Slots(Readers):
    """The cache of a program, and its reader threads.

    Parameters
    ----------
    plan : ColdPlan or ExpertsPlan
    cold : Cold or None
        Where clusters of neurons are in the file.
    region : uint8 array
        Memory of the region ``cold`` or ``experts``.
    file : File
    state : os.stat_result
        Of the file, when its contents were checked.
    ranges : sequence of (int, int)
        Numbers of the instructions that use the found slots: from after the one that looks up to the layer's last one.
    events, kernels, ctx : as for `Readers`
    """

    def __init__(self, plan: ColdPlan | ExpertsPlan, cold: Cold | None, region: NDArray[np.uint8], file: File,
                 state: os.stat_result, ranges: Sequence[tuple[int, int]], events: NDArray[np.int64],
                 kernels: Kernels, ctx: NDArray[np.int64]):
        self.plan, self._cold, self._region, self._ranges = plan, cold, region, ranges
        self._stop = self._stopped = -1
        self._decoded, self._counts = 0, ctx
        self._slots = region[: plan.slots * plan.slot_bytes].reshape(plan.slots, -1)
        self._table = self._at(plan.table, plan.table_words, np.int32)
        self._owners = self._at(plan.owners, plan.slots, np.int32)
        self._stamps = self._at(plan.stamps, plan.slots, np.int64)
        self._own = self._at(plan.words, abi.COLD_BYTES // 8, np.int64)
        parts = np.zeros((plan.events, abi.PART_BYTES // 8), np.int64)
        super().__init__(READERS, file, state, np.zeros((plan.pieces, abi.PIECE_BYTES // 8), np.int64), parts, events,
                         region, kernels, ctx, queue=True)
        self._forget()

    @property
    def hits(self) -> Hits:
        """Return the cache hits and misses of decoded tokens so far."""
        return Hits(self._decoded, int(self._own[abi.COLD_HITS >> 3]), int(self._own[abi.COLD_MISSES >> 3]))

    def forget(self) -> None:
        """Empty the cache between two forward passes."""
        if self._park(lambda: False):
            self._forget()

    def begin(self, first: int, stop: int, ended: Callable[[], bool]) -> None:
        """Wait for reads that a pass has left which was cancelled; after one that failed, forget all slots, but for a
        forward pass that continues within an FFN: it ends where it needs missing data.

        Raises `EdgeInferError` if the forward pass begins within an FFN whose weights it has not requested.
        """
        self.passes += 1
        continues, inside = first == self._stopped, any(begin <= first < end for begin, end in self._ranges)
        if inside and not continues:
            raise EdgeInferError(f"Instruction {first} computes with weights that an earlier one has read; let the "
                                 "forward "
                                 "pass "
                                 f"begin before that one, or where the last one has ended ({self._stopped}).")
        self._stop, self._stopped = stop, -1
        self._decoded += 0 if first else int(self._counts[(abi.CTX_COUNTS >> 3) + abi.COUNT_DECODED])
        while self._under_way(continues) and not self._words[_FAILED] and not ended():
            time.sleep(NAP_SECONDS)
        if self._words[_FAILED]:
            if not inside and self._park(ended):  # else the completion events of missing data end the forward pass
                self._forget()
        elif not continues and not self._under_way(continues):  # no instruction will release an early one's slots
            held = self._held()
            self._parts[held, _LEFT], self._events[held], self._own[_EARLY] = 0, 1, 0

    def came(self, event: int) -> None:
        """Compare the checksums of all clusters of a part that the last instruction has found; raises `BundleError`."""
        epoch, plan = self._own[abi.COLD_EPOCH >> 3], self.plan
        if self._cold is None or not isinstance(plan, ColdPlan):  # of experts there are no sums one by one
            return
        for slot in np.flatnonzero((self._stamps == epoch) & (self._owners >= 0)):
            layer, cluster = divmod(int(self._owners[slot]), plan.clusters)
            part = max(0, (cluster << plan.shift) - plan.hot[layer]) // plan.part_neurons(layer)
            if abi.COLD_PARTS * layer + part == event:
                self._cold.check(layer, cluster, self._slots[slot].tobytes())

    def check(self, failed: bool) -> None:
        """Raise the error of a forward pass that has ended, as `Readers.check`."""
        super().check(failed)
        self._stopped = self._stop

    def _held(self) -> slice:
        """The parts of the layer whose early instruction has asked for neurons, and whose other instruction did not
        run.
        """
        first = int(self._own[_EARLY]) - 1
        return slice(first, first + abi.COLD_PARTS) if first >= 0 else slice(0, 0)

    def _under_way(self, continues: bool) -> bool:
        """Return whether reads are left; those of a held layer are waited for later by a forward pass that
        `continues`."""
        held, events = self._held(), self._events[: len(self._parts)].copy()
        events[held] = 1
        return not events.all() or (not continues and bool((self._parts[held, _LEFT] > 1).any()))

    def _at(self, offset: int, n: int, kind: Any) -> NDArray[Any]:
        return self._region[offset : offset + n * np.dtype(kind).itemsize].view(kind)

    def _forget(self) -> None:
        """Begin with empty slots; called while all readers are parked."""
        self._table[:] = self._owners[:] = -1
        self._region[self.plan.cleared : self.plan.words] = 0
        self._parts[:] = 0
        self._events[: len(self._parts)] = 1
        self._own[_EARLY] = 0
        self._words[_NEXT] = self._words[_RELEASED] = self._words[_FAILED] = 0
        self._set_state(abi.STREAM_RUNS)
