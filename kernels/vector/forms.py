"""Forms of weights with codes of 4 to 6 bits in layout tile16: what kernels are compiled for, in numbers.

`edgeinfer.quant.types` has the same types for sizes and headers, `edgeinfer.quant.packed` says where what lies. They
stand here again because the sources of kernels name their objects; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple

INPUT_COLUMNS = 32
"""Columns of activations that share a scale, at least; groups of weights may be smaller."""


class Form(NamedTuple):
    """One type of weights."""

    groups: tuple[int, ...] = (32,)
    """Columns of a group."""
    bits: int = 4
    offset: int = 0
    """What codes are above levels."""
    table: tuple[int, ...] = ()
    """Level of each code where they are not uniform."""
    nested: str = ""
    """Scales and minima are u8 or i8 times an fp16 number of 256 columns; empty where they are fp16."""
    minimum: bool = False

    @property
    def fine(self) -> bool:
        """Whether groups are smaller than those of activations, and scaled as `fine.py` has it."""
        return self.groups[0] < INPUT_COLUMNS

    @property
    def chain(self) -> int:
        """Products of two codes each with activations (-128 .. 127) that a sum of 16 bits holds."""
        largest = max(map(abs, self.table)) if self.table else (1 << self.bits) - 1
        return 32767 // (2 * 128 * largest)

    @property
    def nibble_lines(self) -> int:
        """Lines of nibbles in a run."""
        return 1 if self.bits == 4 else 4 // (self.bits - 4)

    @property
    def run_lines(self) -> int:
        """Lines of a run: those of nibbles, and one of further bits."""
        return self.nibble_lines + (self.bits > 4)

    def record_groups(self, group: int) -> int:
        """Groups of columns in a record."""
        return 256 // group if self.nested else 2

    def input_group(self, group: int) -> int:
        """Columns of a group of activations."""
        return max(group, INPUT_COLUMNS)

    def parts(self, group: int) -> int:
        """Parts of a record whose activations share a scale."""
        return self.record_groups(group) * group // self.input_group(group)

    def group_lines(self, group: int) -> int:
        """Lines that hold a group's codes."""
        return group // 8 // self.nibble_lines * self.run_lines

    def factors_at(self, group: int) -> int:
        """Byte of a record at which its factors begin."""
        return 64 * self.record_groups(group) * self.group_lines(group)

    def minima_at(self, group: int) -> int:
        """Byte at which its minima begin, where there are any."""
        return self.factors_at(group) + (16 if self.nested else 32) * self.record_groups(group)

    def outer_at(self, group: int) -> int:
        """Byte of the line of outer factors, or where the record ends."""
        return self.minima_at(group) + self.minimum * (self.minima_at(group) - self.factors_at(group))

    def record_bytes(self, group: int) -> int:
        """Bytes of a record of 16 rows."""
        return self.outer_at(group) + (64 if self.nested else 0)


_BELL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMS = {
    "q4": Form((32, 64, 128), offset=8),
    "q4m": Form((32, 64, 128), minimum=True),
    "q4k": Form(nested="u8", minimum=True),
    "q5": Form(bits=5, offset=16),
    "q5m": Form(bits=5, minimum=True),
    "q5k": Form(bits=5, nested="u8", minimum=True),
    "q6": Form((16,), bits=6, offset=32, nested="i8"),
    "iq4": Form(table=_BELL),
    "iq4k": Form(table=_BELL, nested="i8"),
    "mxfp4": Form(table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
}
