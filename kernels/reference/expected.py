"""Expected contents of memory after a kernel, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass

Array = NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """One array that a kernel writes.

    Integers `where` beside float `values` are quantised: the integer may be whatever the value, moved by at most the
    tolerance, rounds to.
    """

    name: str
    """Name for the message."""
    where: Array
    """Live view of the memory that the kernel writes."""
    values: Array | Callable[[], Array]
    """Expected values; a function is called after the kernel has run and computes them from other results."""
    exact: bool = True
    """Equal bit for bit (zeros of either sign are equal)."""
    tolerance: float | Array | None = None
    """Largest absolute difference where not exact: a number, or one for each element."""
    read: Callable[[Array], Array] | None = None
    """Makes of that memory the array that is compared, where its elements are smaller than a byte."""

    @property
    def found(self) -> Array:
        """Return the present values."""
        return self.read(self.where) if self.read else self.where


def compare(expected: list[Expected]) -> str | None:
    """Compare memory with the expectation, after the kernel has run.

    Returns
    -------
    str or None
        None if all agree; otherwise a sentence about the largest deviation of the first array that does not.
    """
    for one in expected:
        if message := _deviation(one):
            return message
    return None


def _deviation(one: Expected) -> str | None:
    """A sentence if this array is not as expected."""
    values, found = np.asarray(one.values() if callable(one.values) else one.values), one.found
    if values.shape != found.shape:
        return f"{one.name}: the reference expects shape {values.shape}, memory has {found.shape}."
    if np.array_equal(found, values):
        return None
    have, want = found.astype(np.float64), values.astype(np.float64)
    allowed = np.broadcast_to(0.0 if one.exact or one.tolerance is None else one.tolerance, want.shape)
    if found.dtype.kind in "iu" and values.dtype.kind == "f" and not one.exact:
        allowed = allowed + 0.5
    with np.errstate(invalid="ignore", over="ignore"):
        excess = np.abs(have - want) - allowed
    excess[(have == want) | (np.isnan(have) & np.isnan(want))] = 0  # equal infinities differ by NaN
    excess[np.isnan(excess)] = np.inf
    if not excess.size or excess.max() <= 0:
        return None
    at = np.unravel_index(int(excess.argmax()), excess.shape)
    wrong = int((excess > 0).sum())
    index = ", ".join(str(int(i)) for i in at)
    return (
        f"{one.name}[{index}] is {have[at]:.9g}, its reference gives {want[at]:.9g} (tolerance "
        f"{float(allowed[at]):.3g}); "
        f"{wrong} of {excess.size} values deviate."
    )
