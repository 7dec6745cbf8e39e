"""Types of weights whose codes have fewer than 8 bits: one body of kernels serves them all (packed.py).

The rows are those of the table of storage types. `edgeinfer.quant.packed` documents the layout.
"""

from __future__ import annotations

from edgeinfer.quant import INPUT_COLUMNS, TYPES, StorageType

FORMS: dict[str, StorageType] = {name: row for name, row in TYPES.items() if row.groups and row.bits < 8}


def is_fine(form: StorageType) -> bool:
    """Whether groups are smaller than those of activations, and scaled as `small_groups.py` has it: 16 columns, whose
    four sums of four fill a vector of one token, and no minimum, for the record's offsets are those of such groups."""
    fine = form.groups[0] < INPUT_COLUMNS
    assert not fine or (form.groups == (16,) and not form.minimum), form
    return fine


def lift_of(form: StorageType) -> int:
    """Return the offset that makes a table's levels unsigned, if sums of several products fit 16 bits; else 0."""
    lift = -min(form.table, default=0)
    return lift if _products_in(lift + max(form.table, default=0)) > 1 else 0


def chain_of(form: StorageType) -> int:
    """Products of two codes each with activations (-128 .. 127) that a sum of 16 bits holds."""
    if form.indexed:
        return _products_in(lift_of(form) + max(form.table) if lift_of(form) else 127)
    return _products_in((1 << form.bits) - 1)


def _products_in(largest: int) -> int:
    return 32767 // (2 * 128 * largest) if largest else 0
