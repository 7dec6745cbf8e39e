"""Threads that read from storage and never enter Python: their file, the block that they share, why a read failed.

The inner half is kernels/ops/stream.py. `Stream` has them read layers ahead of use, `Slots` neurons that are wanted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError, EdgeInferError
from edgeinfer.kernels import Kernels, abi

from ..memory import allocate
from .direct import File

END_SECONDS = 2.0
"""Wait for reads under way when a model is closed; a disk that does not answer keeps its thread and the memory."""
NAP_SECONDS = 0.5e-3
_PREAD = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_FAILED, _BUSY, _STATE, _READ = (offset >> 3 for offset in (
    abi.STREAM_FAILED, abi.STREAM_BUSY, abi.STREAM_STATE, abi.STREAM_READ))
_stuck: list[Any] = []
"""Objects used by threads whose reads did not return; kept alive until the process ends."""


def _host_pread() -> tuple[int, int, Any]:
    """Return the addresses of `pread` and `posix_fadvise` (0 if there is none), and the object that must outlive them.

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


class Readers:
    """Reader threads of one program, their file and their tables.

    Parameters
    ----------
    n : int
        Threads.
    file : File
    state : os.stat_result
        Of the file, when its contents were checked.
    pieces, parts : int64 arrays
        Tables of PIECE_* and PART_* (kernels/abi/reading.py).
    events : int64 array
        Those of the program.
    region : uint8 array
        Memory that is read into.
    kernels : Kernels
    ctx : int64 array
        Of the pool: the readers use the host's functions in it.
    queue : bool
        Whether instructions post the pieces.

    Attributes
    ----------
    address : int
        Of the STREAM_* block.
    passes : int
        Forward passes so far.
    """

    def __init__(self, n: int, file: File, state: os.stat_result, pieces: NDArray[np.int64], parts: NDArray[np.int64],
                 events: NDArray[np.int64], region: NDArray[np.uint8], kernels: Kernels, ctx: NDArray[np.int64],
                 queue: bool = False):
        self.file, self._state, self._pieces, self._parts, self._events = file, state, pieces, parts, events
        self.passes = 0
        self._words = allocate(abi.STREAM_BYTES).view(np.int64)
        self.address = self._words.ctypes.data
        pread, drop, keep = _host_pread()
        for offset, value in ((abi.STREAM_PREAD, pread), (abi.STREAM_FILE, file.handle),
                              (abi.STREAM_DROP, 0 if file.direct else drop), (abi.STREAM_QUEUE, int(queue)),
                              (abi.STREAM_PIECES, pieces.ctypes.data), (abi.STREAM_N_PIECES, len(pieces)),
                              (abi.STREAM_PARTS, parts.ctypes.data), (abi.STREAM_N_PARTS, len(parts)),
                              (abi.STREAM_EVENTS, events.ctypes.data), (abi.STREAM_STATE, abi.STREAM_PAUSES)):
            self._words[offset >> 3] = value
        self._reader, self._ctx = kernels.function("reader"), ctx.ctypes.data
        self._set_state = partial(self._reader, self.address, self._ctx, -1)
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._set_state, self._threads, file.handle,
                                     (self._words, region, pieces, parts, events, kernels, ctx, keep))
        self._start(n)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, those ahead of the next forward pass included."""
        return int(self._words[_READ])

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a whole forward pass reads if layers are streamed; 0 if tokens select the reads."""
        return 0

    @property
    def hits(self) -> tuple[int, ...]:
        """Return the hits of decoded tokens so far; empty if tokens do not select the reads."""
        return ()

    @property
    def direct(self) -> bool:
        """True if reads go past the system's page cache."""
        return self.file.direct

    def begin(self, first: int, stop: int, ended: Callable[[], bool]) -> None:
        """Make ready for a forward pass over these instructions; returns early once `ended`: it is not wanted any more.
        """
        raise NotImplementedError

    def came(self, event: int) -> None:
        """Verify the data behind a completion event (EDGEINFER_CHECK=1); raises `BundleError` if it is damaged."""

    def check(self, failed: bool) -> None:
        """Raise the error of a pass that has ended: a read that it waited for, or a file that was written to.

        Raises `BundleError`.
        """
        number = int(self._words[_FAILED]) - 1
        if failed and number >= 0:
            raise BundleError(self._reason(self._pieces[number]))
        self.file.check(self._state)

    def close(self) -> None:
        """End the readers and close the file."""
        self._end()

    def _park(self, ended: Callable[[], bool]) -> bool:
        """Stop the readers; False if one still reads once `ended`."""
        self._set_state(abi.STREAM_PAUSES)
        while self._words[_BUSY] and not ended():
            time.sleep(NAP_SECONDS)
        return not self._words[_BUSY]

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

    def _start(self, n: int) -> None:
        self._words[_BUSY] = n
        for number in range(n):
            thread = threading.Thread(target=self._reader, args=(self.address, self._ctx, number, n), daemon=True,
                                      name=f"edgeinfer-reader-{number}")
            try:
                thread.start()
            except RuntimeError as error:
                self._end()
                raise EdgeInferError(f"The system refuses {n} threads that read ({error}); end other programs, "
                                     "or raise --budget so that all weights fit.") from None
            self._threads.append(thread)


def _end(process: int, set_state: Callable[[int], int], threads: list[threading.Thread], handle: int,
         used: tuple[Any, ...]) -> None:
    """End the readers, then close the file; memory that a hanging read still uses is kept."""
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
