"""The regions of a plan as real memory: taken once, whole, before the first token."""

from __future__ import annotations

import mmap
from contextlib import suppress

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
