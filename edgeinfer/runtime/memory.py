"""The regions of a plan as real memory: taken once, whole, before the first token."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import EdgeInferError

_HUGE = 2 << 20
# Python maps anonymous memory as shared unless told otherwise: a forked child would write into it, and Linux gives such
# memory no huge pages.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory at a multiple of 64 bytes, resident from the start, on huge pages where the system gives them.

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
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE if nbytes >= _HUGE else -raw.ctypes.data % 64
    view = raw[start : start + nbytes]
    view[:: mmap.PAGESIZE] = 0  # touch every page: taken now, not while tokens flow
    return view


READ_BYTES = 64 << 20
"""Weights read in at a time."""
_POPULATE_READ = 22  # Linux 5.14: map pages for reading, all at once


def read_in(weights: NDArray[np.uint8], path: Path, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Bring mapped weights into memory in file order, with large reads, before the first token asks for them.

    Page faults read a cold file 5-8 times slower than the disk can (llama.cpp issue 9244), and one by one they cost
    0.1-0.25 us even when it is cached. Where the system lacks these calls the pages come as they are touched.

    Parameters
    ----------
    weights : uint8 array
        The mapping.
    path : Path
        The file behind it.
    progress : callable, optional
        Called with (bytes done, bytes in all, file name).
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size = weights.ctypes.data, weights.nbytes
    with open(path, "rb") as file:
        for at in range(0, size, READ_BYTES):
            n = min(READ_BYTES, size - at)
            os.posix_fadvise(file.fileno(), at, min(2 * READ_BYTES, size - at), os.POSIX_FADV_WILLNEED)
            if madvise(start + at, n, _POPULATE_READ):
                return
            if progress:
                progress(at + n, size, path.name)
