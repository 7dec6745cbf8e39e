"""Types of weights whose codes have fewer than 8 bits: one body of kernels serves them all (packed.py).

The rows are those of the table of storage types. `edgeinfer.quant.packed` says where what is.
"""

from __future__ import annotations

from edgeinfer.quant import INPUT_COLUMNS, TYPES, StorageType

FORMS: dict[str, StorageType] = {name: row for name, row in TYPES.items() if row.groups and row.bits < 8}


def is_fine(form: StorageType) -> bool:
    """Whether groups are smaller than those of activations, and scaled as `small_groups.py` has it."""
    return form.groups[0] < INPUT_COLUMNS


def chain_of(form: StorageType) -> int:
    """Products of two codes each with activations (-128 .. 127) that a sum of 16 bits holds."""
    largest = max(map(abs, form.table or (127,))) if form.indexed else (1 << form.bits) - 1
    return 32767 // (2 * 128 * largest)
