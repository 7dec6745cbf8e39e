"""Parameters of the instruction that releases a buffer of streamed weights."""

from __future__ import annotations

from typing import NamedTuple


class _Release(NamedTuple):
    part: int
    """Number of the part whose buffer is free."""


RELEASE = _Release(*range(1))
