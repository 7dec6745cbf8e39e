"""`@kernel` registers a function under a name; nothing compiles at import (see build.py)."""

from __future__ import annotations

from collections.abc import Callable

KERNELS: dict[str, Callable[..., int]] = {}


def kernel(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register ``int64 f(inst, ctx, tid, n_threads)`` under `name`."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        if name in KERNELS:
            raise ValueError(f"Two kernels are named {name!r}.")
        KERNELS[name] = function
        return function

    return register
