"""A kernel from outside the package, for kernels/test_catalogue.py: rows times a number."""

from __future__ import annotations

from typing import NamedTuple


class Scale(NamedTuple):
    """Names of its parameters."""

    width: int
    stride: int
    rows: int
    factor: int


SCALE = Scale(*range(4))
