"""The regions of a plan as real memory: taken once, whole, before the first token."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.errors import BundleError, EdgeInferError

from ..base.progress import OnStageProgress

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE = 2 << 20
# Python maps anonymous memory as shared unless told otherwise: a forked child would write into it, and Linux gives such
# memory no huge pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def allocate(nbytes: int, touched: bool = True, huge: bool = True) -> NDArray[np.uint8]:
    """Zeroed memory at a multiple of 64 bytes, resident from the start, on huge pages where the system gives them.

    With `touched` false its pages are left to a `Prefaulter`; `huge` false asks for small ones.

    Raises
    ------
    EdgeInferError
        If the system refuses.
    """
    try:
        memory = mmap.mmap(-1, max(nbytes, 1) + (_HUGE if nbytes >= _HUGE else 0), **_PRIVATE)
    except (OSError, ValueError, OverflowError) as error:
        raise EdgeInferError(
            f"The system refuses {nbytes / 1e9:.2f} GB of memory ({error}); lower --ctx or --budget."
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _HUGE:
        with suppress(OSError):  # a kernel without transparent huge pages serves small ones
            memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE if nbytes >= _HUGE else -raw.ctypes.data % 64
    view = raw[start : start + nbytes]
    if touched:
        view[:: mmap.PAGESIZE] = 0  # taken now, not while tokens flow
    return view


def read_seldom(weights: NDArray[np.uint8]) -> None:
    """Tell the system that a part of a mapped file is read a few pages at a time, wherever: it reads nothing ahead."""
    if sys.platform.startswith("linux"):
        skipped = -weights.ctypes.data % mmap.PAGESIZE
        _madvise()(weights.ctypes.data + skipped, max(0, weights.nbytes - skipped), mmap.MADV_RANDOM)


def lock(weights: NDArray[np.uint8]) -> None:
    """Lock mapped weights into memory until they are unmapped.

    Raises `EdgeInferError` if the system does not allow it.
    """
    if sys.platform == "win32":
        raise EdgeInferError("Weights cannot be locked into memory on Windows; run without --mlock.")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    if libc.mlock(weights.ctypes.data, weights.nbytes):
        import resource

        why = os.strerror(ctypes.get_errno())
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        allowed = "" if limit == resource.RLIM_INFINITY else \
            f": RLIMIT_MEMLOCK allows {limit / 1e6:.3g} MB; raise it (ulimit -l {-(-weights.nbytes // 1024)})"
        raise EdgeInferError(
            f"The system refuses to lock {weights.nbytes / 1e6:.3g} MB of weights ({why}){allowed}, or run without "
            "--mlock."
        )


READ_BYTES = 64 << 20
"""Weights read in at a time."""
PREFAULT_BYTES = 32 << 20
"""Memory populated at a time: a close waits no longer."""
POPULATE_TRIES = 100
"""Interruptions of one call after which it is given up."""
PROGRESS_BYTES = 10**9
"""Size of the weights from which on progress is reported."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14: map pages all at once, for reading or with memory of their own


class Prefaulter:
    """A thread that gives a region its pages in order, ahead of the tokens that need them.

    A KV pool of 1 GB costs 0.05-0.1 s, and seconds where a virtual machine must first get the memory from its host; the
    first block is needed at once, the last after thousands of tokens. If the system cannot populate pages without
    writing to them they are written to now, by the caller.

    Parameters
    ----------
    memory : uint8 array
        Zeroed, from `allocate`; it may be used as soon as this object is there.
    """

    def __init__(self, memory: NDArray[np.uint8]):
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        first = min(PREFAULT_BYTES, memory.nbytes)
        if memory.nbytes < _HUGE or not _populate(memory[:first], _POPULATE_WRITE):
            memory[:: mmap.PAGESIZE] = 0
        elif memory.nbytes > first:
            thread = threading.Thread(target=self._populate_all, args=(memory,), daemon=True, name="edgeinfer-prefault")
            try:
                thread.start()
            except RuntimeError:  # no thread to be had: the pages come now
                self._populate_all(memory)
            else:
                self._thread = thread

    def wait(self) -> None:
        """Return when all pages are there."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop; returns when the memory is no longer needed."""
        self._stop.set()
        self.wait()

    def _populate_all(self, memory: NDArray[np.uint8]) -> None:
        for at in range(PREFAULT_BYTES, memory.nbytes, PREFAULT_BYTES):
            if self._stop.is_set() or not _populate(memory[at : at + PREFAULT_BYTES], _POPULATE_WRITE):
                return


def read_in(weights: NDArray[np.uint8], path: Path, progress: OnStageProgress | None = None,
            spans: Sequence[tuple[int, int]] | None = None) -> None:
    """Bring mapped weights into memory in file order, with large reads, before the first token asks for them.

    Page faults read a cold file 5-8 times slower than the disk can (llama.cpp issue 9244), and one by one they cost
    0.1-0.25 us even when it is cached. If the system cannot map pages in bulk the file is read through once, and its
    pages are mapped as they are touched.

    Parameters
    ----------
    weights : uint8 array
        The mapping.
    path : Path
        The mapped file.
    progress : callable, optional
        Called with (bytes done, bytes in all, file name) if there are PROGRESS_BYTES or more.
    spans : of (first byte, byte after the last), optional
        Parts that are wanted, from whole pages on; by default all.
    """
    spans = [(0, weights.nbytes)] if spans is None else spans
    size, done = sum(stop - start for start, stop in spans), 0
    tell = progress if progress and size >= PROGRESS_BYTES else lambda done, total, name: None
    tell(0, size, path.name)
    buffer, mapping = bytearray(0), True
    with _weights_file(path) as file:
        for at, end in ((at, stop) for start, stop in spans for at in range(start, stop, READ_BYTES)):
            n = min(READ_BYTES, end - at)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), at, min(2 * READ_BYTES, end - at), os.POSIX_FADV_WILLNEED)
            mapping = mapping and _populate(weights[at : at + n], _POPULATE_READ)
            if not mapping:
                buffer = buffer or bytearray(min(READ_BYTES // 8, size))
                _read_through(file, at, n, buffer)
            done += n
            tell(done, size, path.name)


def copy_in(parts: Sequence[tuple[int, NDArray[np.uint8]]], path: Path,
            progress: OnStageProgress | None = None) -> None:
    """Read parts of a file into memory of the process; no page of the file is mapped.

    Parameters
    ----------
    parts : of (byte offset in the file, uint8 array to fill)
    path : Path
    progress : callable, optional
        As for `read_in`.

    Raises
    ------
    BundleError
        The file cannot be read, or ends early.
    """
    total, done = sum(memory.nbytes for _, memory in parts), 0
    tell = progress if progress and total >= PROGRESS_BYTES else lambda done, total, name: None
    with _weights_file(path) as file:
        for at, memory in parts:
            file.seek(at)
            for start in range(0, memory.nbytes, READ_BYTES):
                left = memory[start : start + READ_BYTES]
                while left.nbytes:
                    if not (got := file.readinto(left.data)):
                        raise BundleError(f"{path} ends before byte {at + memory.nbytes}; convert the model again.")
                    left = left[got:]
                tell(done + min(start + READ_BYTES, memory.nbytes), total, path.name)
            done += memory.nbytes


@contextmanager
def _weights_file(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file that was compared with its checksum before; raises `BundleError` if it cannot be read now."""
    with os_errors(BundleError, f"{path} can no longer be read", "; check its disk."), open_plain(path) as file:
        yield file


def _populate(memory: NDArray[np.uint8], advice: int) -> bool:
    """Map all pages of a page-aligned array; False if the system cannot. A signal ends the call: it is repeated."""
    if not sys.platform.startswith("linux"):
        return False
    madvise = _madvise()
    for _ in range(POPULATE_TRIES):
        if madvise(memory.ctypes.data, memory.nbytes, advice) == 0:
            return True
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            return False
    return False


def _madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def _read_through(file: io.BufferedReader, at: int, n: int, buffer: bytearray) -> None:
    """Read a part of the file for its effect on the system's cache; a file that ends early is the mapping's matter."""
    file.seek(at)
    while n > 0 and (got := file.readinto(memoryview(buffer)[: min(n, len(buffer))])):
        n -= got
