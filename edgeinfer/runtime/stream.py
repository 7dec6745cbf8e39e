"""Streaming: weights that do not fit are read ahead of use into planned buffers, by threads that never enter Python.

The inner half is kernels/ops/stream.py. This class writes the tables of what is read, opens the file past the system's
page cache where it allows that, sets the readers to the part that a walk begins with, and says why a read failed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError, EdgeInferError
from edgeinfer.kernels import Kernels, abi
from edgeinfer.memory_planner import PAGE_BYTES, READ_BYTES, STREAM_BUFFERS, MemoryPlan
from edgeinfer.sizes import round_up

from .direct import File
from .memory import allocate

RELEASE_KERNEL = "stream_release"
READERS = 4
"""Threads that read: enough to keep a disk busy with reads of READ_BYTES (docs/streaming.md)."""
END_SECONDS = 2.0
"""Wait for reads under way when a model is closed; a disk that does not answer keeps its thread and the memory."""
_NAP_SECONDS = 0.5e-3
_PREAD = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_FAILED, _BUSY, _STATE, _NEXT, _RELEASED, _READ = (offset >> 3 for offset in (
    abi.STREAM_FAILED, abi.STREAM_BUSY, abi.STREAM_STATE, abi.STREAM_NEXT, abi.STREAM_RELEASED, abi.STREAM_READ))
_stuck: list[Any] = []
"""What threads use whose reads did not return; it must stay until the process ends."""


def _host_pread() -> tuple[int, int, Any]:
    """Return the addresses of `pread` and `posix_fadvise` (0 where there is none), and what must outlive them.

    Windows has no `pread`: there every read goes through Python.
    """
    if hasattr(os, "pread"):
        libc = ctypes.CDLL(None)
        drop = getattr(libc, "posix_fadvise", None) if sys.platform.startswith("linux") else None
        return _address(libc.pread), _address(drop) if drop else 0, libc
    lock = threading.Lock()

    def pread(file: int, to: int, length: int, offset: int) -> int:
        try:
            with lock:
                os.lseek(file, offset, os.SEEK_SET)
                data = os.read(file, length)
        except OSError:
            return -1
        ctypes.memmove(to, data, len(data))
        return len(data)

    callback = _PREAD(pread)
    return _address(callback), 0, callback


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Stream:
    """Reader threads of one program, their file and their tables.

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
        Number of the record that releases each part.
    tickets : int64 array
        Those of the program.
    kernels : Kernels
    ctx : int64 array
        Of the pool: the readers use the host's functions in it.

    Attributes
    ----------
    address : int
        Of the STREAM_* block.
    walks : int
        Walks so far.
    """

    def __init__(self, plan: MemoryPlan, region: NDArray[np.uint8], file: File, state: os.stat_result,
                 offsets: Mapping[str, int], ends: list[int], tickets: NDArray[np.int64], kernels: Kernels,
                 ctx: NDArray[np.int64]):
        self.file, self._state, self._ends, self._tickets = file, state, np.array(ends), tickets
        self.walks = 0
        self._words = allocate(abi.STREAM_BYTES).view(np.int64)
        self.address = self._words.ctypes.data
        self._pieces = pieces(plan, region.ctypes.data, offsets)
        self._parts = _parts(self._pieces[:, abi.PIECE_PART >> 3], len(plan.parts))
        pread, drop, keep = _host_pread()
        for offset, value in ((abi.STREAM_PREAD, pread), (abi.STREAM_FILE, file.handle),
                              (abi.STREAM_DROP, 0 if file.direct else drop),
                              (abi.STREAM_PIECES, self._pieces.ctypes.data), (abi.STREAM_N_PIECES, len(self._pieces)),
                              (abi.STREAM_PARTS, self._parts.ctypes.data), (abi.STREAM_N_PARTS, len(self._parts)),
                              (abi.STREAM_TICKETS, tickets.ctypes.data), (abi.STREAM_STATE, abi.STREAM_PAUSES)):
            self._words[offset >> 3] = value
        self._reader, self._ctx = kernels.function("reader"), ctx.ctypes.data
        self._set_state = partial(self._reader, self.address, self._ctx, -1)
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._set_state, self._threads, file.handle,
                                     (self._words, region, self._pieces, self._parts, tickets, kernels, ctx, keep))
        self._start()

    @property
    def bytes_per_walk(self) -> int:
        """Bytes that a walk over the whole program reads."""
        return int(self._pieces[:, abi.PIECE_LENGTH >> 3].sum())

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, those ahead of the next walk included."""
        return int(self._words[_READ])

    def begin(self, first: int, stop: int, ended: Callable[[], bool]) -> None:
        """Set the readers to the first part that a walk over these records needs; nothing to do where it comes next.

        Returns early once `ended`: the walk is not wanted any more.
        """
        self.walks += 1
        part = int(np.searchsorted(self._ends, first))
        if part == len(self._ends) or first >= stop:
            return
        words = self._words
        runs = words[_STATE] == abi.STREAM_RUNS and not words[_FAILED]
        if runs and words[_RELEASED] % len(self._ends) == part:
            return
        self._set_state(abi.STREAM_PAUSES)
        while words[_BUSY] and not ended():
            time.sleep(_NAP_SECONDS)
        if words[_BUSY]:
            return
        self._tickets[: len(self._parts)] = 0
        self._parts[:, abi.PART_LEFT >> 3] = self._parts[:, abi.PART_PIECES >> 3]
        words[_NEXT] = np.searchsorted(self._pieces[:, abi.PIECE_PART >> 3], part)
        words[_RELEASED], words[_FAILED] = part, 0
        self._set_state(abi.STREAM_RUNS)

    def check(self, failed: bool) -> None:
        """Say what went wrong with a walk that has ended: a read that it waited for, or a file that was written to.

        Raises `BundleError`.
        """
        number = int(self._words[_FAILED]) - 1
        if failed and number >= 0:
            raise BundleError(self._reason(self._pieces[number]))
        self.file.check(self._state)

    def close(self) -> None:
        """End the readers and close the file."""
        self._end()

    def _reason(self, piece: NDArray[np.int64]) -> str:
        """Why a piece cannot be read: it is tried again where Python sees the error."""
        offset, length, least = (int(piece[at >> 3]) for at in (abi.PIECE_OFFSET, abi.PIECE_LENGTH, abi.PIECE_LEAST))
        path = self.file.path
        try:
            size = os.fstat(self.file.handle).st_size
            if size >= offset + least and hasattr(os, "preadv"):
                with mmap.mmap(-1, length) as buffer:
                    os.preadv(self.file.handle, [buffer], offset)
        except OSError as error:
            return f"{path} can no longer be read at byte {offset}: {error.strerror or error}; check its disk."
        if size < offset + least:
            return (f"{path} ends at byte {size}, where it had weights: another program cut it short; convert or copy "
                    "the model again.")
        return f"{path} could not be read at byte {offset}, and could when it was tried again; check its disk."

    def _start(self) -> None:
        self._words[_BUSY] = READERS
        for number in range(READERS):
            thread = threading.Thread(target=self._reader, args=(self.address, self._ctx, number, READERS), daemon=True,
                                      name=f"edgeinfer-reader-{number}")
            try:
                thread.start()
            except RuntimeError as error:
                self._end()
                raise EdgeInferError(f"The system refuses {READERS} threads that read ({error}); end other programs, "
                                     "or raise --budget so that all weights fit.") from None
            self._threads.append(thread)


def pieces(plan: MemoryPlan, base: int, offsets: Mapping[str, int]) -> NDArray[np.int64]:
    """What is read in a round, in order: whole pages around each weight, READ_BYTES at a time (PIECE_* of abi.py)."""
    rows = []
    for part, names in enumerate(plan.parts):
        for name in names:
            place, offset = plan.places[name], offsets[name]
            start, end = offset // PAGE_BYTES * PAGE_BYTES, offset + place.nbytes
            to = base + place.offset - (offset - start)
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


def _end(process: int, set_state: Callable[[int], int], threads: list[threading.Thread], handle: int,
         used: tuple[Any, ...]) -> None:
    """End the readers, then close the file; what a thread still uses whose read does not return is kept."""
    if process != os.getpid():  # forked: the threads are not here
        return
    set_state(abi.STREAM_ENDS)
    until = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _stuck.append((set_state, used))
    else:
        os.close(handle)
