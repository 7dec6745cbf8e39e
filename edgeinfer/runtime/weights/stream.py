"""Streaming: weights that do not fit are read ahead of use into planned buffers, by threads that never enter Python.

The inner half is kernels/ops/stream.py. This class writes the tables of reads and sets the readers to the part
that a forward pass begins with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.units import round_up
from edgeinfer.kernels import Kernels, abi
from edgeinfer.memory_planner import PAGE_BYTES, READ_BYTES, STREAM_BUFFERS, MemoryPlan, extents

from .direct import File
from .readers import Readers

READERS = 4
"""Threads that read: enough to keep a disk busy with reads of READ_BYTES (docs/explanation/streaming.md)."""
_FAILED, _STATE, _NEXT, _RELEASED = (offset >> 3 for offset in (
    abi.STREAM_FAILED, abi.STREAM_STATE, abi.STREAM_NEXT, abi.STREAM_RELEASED))


class Stream(Readers):
    """Readers of layers, in the order of their use.

    Parameters
    ----------
    plan : MemoryPlan
        With parts that are streamed.
    region : uint8 array
        Memory of the region ``streamed``.
    file : File
    state : os.stat_result
        Of the file, when its contents were checked.
    offsets : mapping of str to int
        Where each weight begins in the file.
    ends : sequence of int
        Number of the instruction that releases each part.
    events, kernels, ctx : as for `Readers`
    """

    def __init__(self, plan: MemoryPlan, region: NDArray[np.uint8], file: File, state: os.stat_result,
                 offsets: Mapping[str, int], ends: list[int], events: NDArray[np.int64], kernels: Kernels,
                 ctx: NDArray[np.int64]):
        self._ends = np.array(ends)
        table = pieces(plan, region.ctypes.data, offsets)
        parts = _parts(table[:, abi.PIECE_PART >> 3], len(plan.parts))
        super().__init__(READERS, file, state, table, parts, events, region, kernels, ctx)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a forward pass over the whole program reads."""
        return int(self._pieces[:, abi.PIECE_LENGTH >> 3].sum())

    def begin(self, first: int, stop: int, ended: Callable[[], bool]) -> None:
        """Set the readers to the first part that a pass over these instructions needs; nothing to do where it comes
        next.

        Returns early once `ended`: the forward pass is not wanted any more.
        """
        self.passes += 1
        part = int(np.searchsorted(self._ends, first))
        if part == len(self._ends) or first >= stop:
            return
        words = self._words
        runs = words[_STATE] == abi.STREAM_RUNS and not words[_FAILED]
        if runs and words[_RELEASED] % len(self._ends) == part:
            return
        if not self._park(ended):
            return
        self._events[: len(self._parts)] = 0
        self._parts[:, abi.PART_LEFT >> 3] = self._parts[:, abi.PART_PIECES >> 3]
        words[_NEXT] = np.searchsorted(self._pieces[:, abi.PIECE_PART >> 3], part)
        words[_RELEASED], words[_FAILED] = part, 0
        self._set_state(abi.STREAM_RUNS)


def pieces(plan: MemoryPlan, base: int, offsets: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the reads of a round, in order: whole pages around each weight, READ_BYTES at a time (abi.PIECE_*)."""
    rows = []
    for part, names in enumerate(plan.parts):
        for name, nbytes in extents(plan.allocations, names).items():
            allocation, offset = plan.allocations[name], offsets[name]
            start, end = offset // PAGE_BYTES * PAGE_BYTES, offset + nbytes
            to = base + allocation.offset - (offset - start)
            for at in range(start, end, READ_BYTES):
                least = min(READ_BYTES, end - at)
                rows.append((at, round_up(least, PAGE_BYTES), least, to + at - start, part))
    return np.array(rows, np.int64)


def _parts(part_of: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """The table of parts: how far back each one's buffer was another's, and its pieces."""
    counts = np.bincount(part_of, minlength=n)
    last = [max(range(buffer, n, STREAM_BUFFERS)) for buffer in range(min(n, STREAM_BUFFERS))]
    behind = [STREAM_BUFFERS if i >= STREAM_BUFFERS else i + n - last[i] for i in range(n)]
    return np.ascontiguousarray(np.stack([behind, counts, counts], axis=1).astype(np.int64))
