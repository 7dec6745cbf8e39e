"""BLAS with one thread: the last bits of its results depend on how many threads share a product or a factorisation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import numpy  # noqa: F401  its BLAS must be loaded before a controller looks for it
from threadpoolctl import ThreadpoolController


def one_thread() -> AbstractContextManager[object]:
    """Return a context in which NumPy's BLAS uses one thread, in all threads of this process."""
    return _controller().limit(limits=1, user_api="blas")


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
