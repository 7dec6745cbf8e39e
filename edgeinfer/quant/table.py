"""The table of storage types: everything that follows from how a weight or a KV row is stored is defined here, once.

Sizes, names, choices, kernels and their references follow from a row. Kernels are compiled for the numbers of a row, so
this file counts to their sources: an edit compiles them again.
"""

from __future__ import annotations

from typing import Any

from ..base.dataclass import dataclass

LINE_BYTES = 64
"""Records, parts and all that is in weights.bin are multiples of a cache line."""
TILE_ROWS = 16
MAX_DIMENSION = 2**31 - 1
LAYOUTS = {"tile16": 2, "neuron": 3, "plain": 1}
"""Layouts, and the dimensions of a tensor in each."""
FFN_LAYOUTS = ("tile16", "neuron")
"""Layouts that an FFN can have: as matrices, or neuron by neuron."""
INPUT_COLUMNS = 32
"""Columns of activations that share a scale, at least; groups of weights may be smaller."""
SUPER_COLUMNS = 256
"""Columns that share the outer fp16 numbers where scales are nested."""
SCALE_BYTES = {"": 0, "f16": 2, "u8*f16": 1, "i8*f16": 1}
"""Kinds of scale, and the bytes of one: fp16, or 8 bits (unsigned, signed) times an fp16 number of 256 columns."""
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of llama.cpp's IQ4 types: near the quantiles of a normal distribution."""
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of a 4-bit float (E2M1 of the OCP Microscaling Formats specification)."""
_ALL, _TILES = ("tile16", "neuron"), ("tile16",)


@dataclass(frozen=True)
class StorageType:
    """Storage of numbers: a weight is level x scale (+ minimum), or a float as it is."""

    name: str
    bits: int
    """Bits of a stored code, or of a float."""
    layouts: tuple[str, ...]
    """Layouts that can hold it."""
    grid: tuple[int, ...] = ()
    """Lowest and highest level of a uniform grid."""
    table: tuple[int, ...] = ()
    """Level of each code where levels are not uniform; IEEE 754 floats have neither grid nor table."""
    groups: tuple[int, ...] = ()
    """Columns that may share a scale; none for floats."""
    scale: str = ""
    """Kind of the scales, as in `SCALE_BYTES`."""
    minimum: bool = False
    """True if each group has a minimum, of the scale's kind, beside its scale."""
    requested: bool = True
    """True if floats can be quantised to it."""
    usual: bool = True
    """True if many models have it: `warmup` compiles its kernels, and plans suggest it."""
    fitted: bool = False
    """True if each tensor has a table of its own, of levels in [-127, 127] that fit its weights."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of kernel names, for each group size: ``q4_g32``, ``f16``."""
        return tuple([f"{self.name}_g{group}" for group in self.groups]) or (self.name,)

    @property
    def nested(self) -> bool:
        """True if scales are 8 bits times a number of 256 columns."""
        return "*" in self.scale

    @property
    def quantised(self) -> bool:
        """True if the kernels multiply int8 activations."""
        return bool(self.groups)

    @property
    def indexed(self) -> bool:
        """True if codes are indices into a table."""
        return bool(self.table) or self.fitted

    @property
    def offset(self) -> int:
        """Offset added to a stored level: codes of a grid below 8 bits are unsigned."""
        return -self.grid[0] if self.grid and self.bits < 8 else 0

    @property
    def factors(self) -> int:
        """Numbers of a group: its scale, and its minimum."""
        return 2 if self.minimum else 1

    @property
    def factor_bytes(self) -> int:
        """Bytes of a group's scale and minimum."""
        return SCALE_BYTES[self.scale] * self.factors

    # -- a record of layout tile16 (packed.py says where what is) ------------------------------------------------

    @property
    def simple(self) -> bool:
        """True if codes of a uniform grid are whole bytes or nibbles, and a group has a scale in fp16 alone."""
        return bool(self.grid and self.groups) and self.bits in (4, 8) and self.scale == "f16" and not self.minimum

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the pieces that a code is stored in, the lowest first: 4 and 1 of a code of 5 bits."""
        return tuple([bits for bits in (8, 4, 2, 1) if self.bits & bits])

    @property
    def run_steps(self) -> int:
        """Steps of 4 columns whose pieces fill whole lines: those of a run."""
        return 8 // self.planes[-1]

    @property
    def first_lines(self) -> int:
        """Lines of a run that hold the lowest bits of its codes; the others are one line."""
        return self.run_steps * self.planes[0] // 8

    @property
    def run_lines(self) -> int:
        """Lines of a run."""
        return self.run_steps * self.bits // 8

    @property
    def neuron_groups(self) -> tuple[int, ...]:
        """Groups in layout neuron, whose kernels scale 16 bytes of codes together."""
        return tuple([group for group in self.groups if group * self.bits >= 128]) if "neuron" in self.layouts else ()

    def group_runs(self, group: int) -> int:
        """Runs of a group."""
        return group // 4 // self.run_steps

    def group_lines(self, group: int) -> int:
        """Lines that hold a group's codes."""
        return self.group_runs(group) * self.run_lines

    def record_groups(self, group: int) -> int:
        """Groups of columns in a record."""
        return SUPER_COLUMNS // group if self.nested else 2

    def input_group(self, group: int) -> int:
        """Columns of activations that share a scale where groups of this many weights are multiplied."""
        return max(group, INPUT_COLUMNS)

    def parts(self, group: int) -> int:
        """Parts of a record whose activations share a scale."""
        return self.record_groups(group) * group // self.input_group(group)

    def factors_at(self, group: int) -> int:
        """Byte of a record at which its factors begin."""
        return LINE_BYTES * self.record_groups(group) * self.group_lines(group)

    def minima_at(self, group: int) -> int:
        """Byte offset of the minima, if there are any."""
        return self.factors_at(group) + TILE_ROWS * SCALE_BYTES[self.scale] * self.record_groups(group)

    def outer_at(self, group: int) -> int:
        """Byte of the line of outer factors, or where the record ends."""
        return self.minima_at(group) + self.minimum * (self.minima_at(group) - self.factors_at(group))

    def record_bytes(self, group: int) -> int:
        """Bytes of a record of 16 rows."""
        return self.outer_at(group) + (LINE_BYTES if self.nested else 0)


def _further(name: str, bits: int, groups: int | tuple[int, ...], scale: str = "f16",
             layouts: tuple[str, ...] = _TILES, **more: Any) -> StorageType:
    """A type of matrices that few models have, or those that other formats have quantised."""
    groups = groups if isinstance(groups, tuple) else (groups,)
    return StorageType(name, bits, layouts, groups=groups, scale=scale, usual=False, **more)


TYPES = {
    row.name: row
    for row in (
        StorageType("q4", 4, _ALL, grid=(-8, 7), groups=(32, 64, 128), scale="f16"),
        StorageType("int8", 8, _ALL, grid=(-127, 127), groups=(32, 64, 128), scale="f16"),
        StorageType("f16", 16, _TILES),
        StorageType("f32", 32, ("tile16", "plain")),
        StorageType("i32", 32, ("plain",), grid=(0, MAX_DIMENSION), requested=False),
        _further("q4m", 4, (32, 64, 128), "f16", grid=(0, 15), minimum=True),
        _further("q4k", 4, 32, "u8*f16", grid=(0, 15), minimum=True),
        _further("q5", 5, 32, "f16", grid=(-16, 15)),
        _further("q5m", 5, 32, "f16", grid=(0, 31), minimum=True),
        _further("q5k", 5, 32, "u8*f16", grid=(0, 31), minimum=True),
        _further("q6", 6, 16, "i8*f16", grid=(-32, 31)),
        _further("iq4", 4, 32, "f16", table=IQ4_LEVELS),
        _further("iq4k", 4, 32, "i8*f16", table=IQ4_LEVELS),
        _further("mxfp4", 4, 32, "f16", table=FP4_LEVELS),
        _further("q2", 2, (32, 64, 128), layouts=_ALL, grid=(-1, 2)),
        _further("tableq", 4, 32, fitted=True),
        _further("tableq3", 3, (32, 64), fitted=True),
    )
}


@dataclass(frozen=True)
class KvType:
    """Storage of the rows of the KV cache: K or V of one head and token (kv.py has the layout)."""

    bits: int
    """Bits of an element."""
    scale_bytes: int = 0
    """Bytes of a row's scale; scales are apart from the elements."""

    @property
    def scaled(self) -> bool:
        """True if elements are codes, each row with a scale in fp16."""
        return self.scale_bytes > 0

    @property
    def highest(self) -> int:
        """The largest code; the lowest is as far from 0."""
        return (1 << self.bits - 1) - 1

    @property
    def piece(self) -> int:
        """Bytes of a row of K that are together in a line of 16 rows: 4 of codes, else an element."""
        return 4 if self.scaled else self.bits // 8

    @property
    def alternating(self) -> int:
        """Rows of V whose bytes alternate in a line: 4 of codes, which are multiplied four rows at a time."""
        return 4 if self.scaled else 1

    def element_bytes(self, elements: int) -> int:
        """Return the bytes of a row's elements, without its scale."""
        return elements * self.bits // 8

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of a row of this many elements (a padded head), its scale included."""
        return self.element_bytes(elements) + self.scale_bytes


KV_TYPES = {"int8": KvType(8, scale_bytes=2), "f16": KvType(16), "f32": KvType(32)}
