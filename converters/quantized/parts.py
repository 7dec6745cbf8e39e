"""Checks of the parts of a quantised module: groups that fill a row, and the order of columns."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from .tensor import Parts

WORDS, SCALES = ("I32", "U32"), ("F16", "BF16", "F32")
"""Types of words of codes, and of scales."""


def size_of(columns: int, size: int) -> int:
    """Columns of a group; 0 if a row is one."""
    return size if size < columns else 0


def groups_of(columns: int, size: int) -> int:
    """Number of groups of a row."""
    return -(-columns // size) if size else 1


def whole_groups(parts: Parts, columns: int, size: int) -> int:
    """Number of groups of a row, which they fill."""
    if size and columns % size:
        raise CheckpointError(f"The module {parts.name:.100} in {parts.path} has rows of {columns} weights, which "
                              f"groups of {size} do not fill; the config and the tensors do not fit together.")
    return groups_of(columns, size)


def order_of(parts: Parts, part: str, columns: int, size: int, groups: int) -> NDArray[np.intp] | None:
    """Return the group of each column; None if the columns of a group are contiguous."""
    if part not in parts:
        return None
    parts.check(part, ("I32", "I64"), (columns,))
    found = parts.whole(part, "<i4" if parts.stored(part).dtype == "I32" else "<i8").astype(np.intp)
    if found.min() < 0 or found.max() >= groups:
        bad = found.min() if found.min() < 0 else found.max()
        raise CheckpointError(f"The {part} of the module {parts.name:.100} in {parts.path} has the group {bad}; there "
                              f"are groups 0 to {groups - 1}.")
    return None if np.array_equal(found, np.arange(columns) // (size or columns)) else found


def ordered(group_of: NDArray[np.intp] | None, size: int) -> tuple[NDArray[np.int32] | None, str]:
    """Return columns sorted by group, in their own order within one, and a name for the order; none if groups are not
    full.
    """
    if group_of is None:
        return None, ""
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[order], np.arange(len(order)) // (size or len(order))):
        return None, ""
    return order, hashlib.sha256(order.tobytes()).hexdigest()[:16]
