"""The table of storage types: what follows from how a weight or a KV row is stored is said here, once.

A further type is a row of `TYPES`, its packing in `layouts.py`, and its kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..dataclass import dataclass
from ..errors import BundleError
from ..sizes import MAX_BYTES, round_up

LINE_BYTES = 64
"""Records, parts and all that lies in weights.bin are multiples of a cache line."""
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
"""Of llama.cpp's IQ4 types: near the quantiles of a bell curve."""
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of a 4-bit float (E2M1 of the OCP Microscaling Formats specification)."""
_ALL, _TILES = ("tile16", "neuron"), ("tile16",)


@dataclass(frozen=True)
class StorageType:
    """How numbers are stored: a weight is level x scale (+ minimum), or a float as it is."""

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
    """Whether each group has a minimum, of the scale's kind, beside its scale."""
    requested: bool = True
    """Whether floats can be quantised to it; else it holds what other formats have quantised."""

    @property
    def nested(self) -> bool:
        """Whether scales are 8 bits times a number of 256 columns."""
        return "*" in self.scale

    @property
    def record_groups(self) -> int:
        """Groups of columns in a record of layout tile16."""
        return SUPER_COLUMNS // self.groups[0] if self.nested else 2

    @property
    def quantised(self) -> bool:
        """Whether the kernels multiply int8 activations."""
        return bool(self.groups)

    @property
    def offset(self) -> int:
        """What is added to a level where it is stored: codes of a grid below 8 bits are unsigned."""
        return -self.grid[0] if self.grid and self.bits < 8 else 0

    @property
    def factors(self) -> int:
        """Numbers of a group: its scale, and its minimum."""
        return 2 if self.minimum else 1

    @property
    def factor_bytes(self) -> int:
        """Bytes of a group's scale and minimum."""
        return SCALE_BYTES[self.scale] * self.factors


def _taken(name: str, bits: int, groups: int | tuple[int, ...], scale: str, **more: Any) -> StorageType:
    """A type of matrices that other formats have quantised."""
    groups = groups if isinstance(groups, tuple) else (groups,)
    return StorageType(name, bits, _TILES, groups=groups, scale=scale, requested=False, **more)


TYPES = {
    row.name: row
    for row in (
        StorageType("q4", 4, _ALL, grid=(-8, 7), groups=(32, 64, 128), scale="f16"),
        StorageType("int8", 8, _ALL, grid=(-127, 127), groups=(32, 64, 128), scale="f16"),
        StorageType("f16", 16, _TILES),
        StorageType("f32", 32, ("tile16", "plain")),
        StorageType("i32", 32, ("plain",), grid=(0, MAX_DIMENSION), requested=False),
        _taken("q4m", 4, (32, 64, 128), "f16", grid=(0, 15), minimum=True),
        _taken("q4k", 4, 32, "u8*f16", grid=(0, 15), minimum=True),
        _taken("q5", 5, 32, "f16", grid=(-16, 15)),
        _taken("q5m", 5, 32, "f16", grid=(0, 31), minimum=True),
        _taken("q5k", 5, 32, "u8*f16", grid=(0, 31), minimum=True),
        _taken("q6", 6, 16, "i8*f16", grid=(-32, 31)),
        _taken("iq4", 4, 32, "f16", table=IQ4_LEVELS),
        _taken("iq4k", 4, 32, "i8*f16", table=IQ4_LEVELS),
        _taken("mxfp4", 4, 32, "f16", table=FP4_LEVELS),
    )
}
GROUP_SIZES = tuple(sorted({group for row in TYPES.values() if row.requested for group in row.groups}))


def requestable() -> tuple[str, ...]:
    """Return the names of the types that floats can be quantised to; the others are what files have."""
    return tuple(name for name, row in TYPES.items() if row.requested)


def holds(layout: str) -> tuple[str, ...]:
    """Return the names of the types that a layout can hold."""
    return tuple(name for name, row in TYPES.items() if layout in row.layouts)


def embedding_type(weights: str) -> str:
    """Return the type that embedding and head have by default, where matrices have the type `weights`."""
    return "int8" if TYPES[weights].quantised else weights


@dataclass(frozen=True)
class WeightType:
    """How one weight is stored: a row of the table, a group size and a layout."""

    dtype: str
    """Name of the row, such as q4."""
    group_size: int = 0
    """Columns that share one scale; 0 for floats."""
    layout: str = "tile16"
    """tile16, neuron or plain (vectors)."""

    @classmethod
    def of(cls, name: str, group_size: int | None = None, layout: str = "tile16") -> WeightType:
        """Return a type by name; the group size (by default its smallest) counts only where it has several.

        Raises
        ------
        BundleError
            There is no such type in the layout, or no such group.
        """
        groups = TYPES[name].groups if name in TYPES else ()
        taken = group_size if group_size is not None and len(groups) > 1 else groups[0] if groups else 0
        return cls(name, taken, layout).checked()

    def checked(self) -> WeightType:
        """Return the type itself, unless no kernel reads this combination of layout, type and group size.

        Raises
        ------
        BundleError
            The sentence names the value and what is possible.
        """
        if self.layout not in LAYOUTS:
            raise BundleError(f"layout {self.layout!r} is unknown; this version reads {', '.join(LAYOUTS)}.")
        if self.dtype not in holds(self.layout):
            raise BundleError(f"type {self.dtype!r} does not exist in layout {self.layout}; it holds "
                              f"{', '.join(holds(self.layout))}.")
        groups = [str(group) for group in self.storage.groups]
        if groups and str(self.group_size) not in groups:
            several = f"{', '.join(groups[:-1])} or " if groups[1:] else ""
            raise BundleError(f"group size {self.group_size} is unknown; {self.dtype} has groups of "
                              f"{several}{groups[-1]}.")
        if not groups and self.group_size != 0:
            raise BundleError(f"group size {self.group_size} makes no sense for {self.dtype}; it must be 0.")
        return self

    @property
    def storage(self) -> StorageType:
        """The row of the table."""
        return TYPES[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether the kernels multiply int8 activations."""
        return self.storage.quantised

    @property
    def input_group(self) -> int:
        """Columns of activations that share a scale where they are multiplied by this; 0: they are floats."""
        return max(self.group_size, INPUT_COLUMNS) if self.quantised else 0

    @property
    def suffix(self) -> str:
        """How names of kernels for such weights end: ``q4_g32``, ``f16``."""
        return f"{self.dtype}_g{self.group_size}" if self.group_size else self.dtype

    @property
    def words(self) -> str:
        """The type for people: ``q4 in groups of 32``, ``f16``."""
        return f"{self.dtype} in groups of {self.group_size}" if self.group_size else self.dtype

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight, its share of the scale included; orders types by size."""
        return 8 * self.bytes_of(1 << 20) / (1 << 20)

    def bytes_of(self, n: int) -> int:
        """Return the bytes of n weights of a row with their scales, without padding."""
        factors = self.storage.factor_bytes * n // self.group_size if self.group_size else 0
        if self.storage.nested:
            factors += 2 * self.storage.factors * n // SUPER_COLUMNS
        return n * self.storage.bits // 8 + factors

    @property
    def _record_columns(self) -> int:
        """Columns of a record in layout tile16: whole groups, or as many floats of 16 rows as fill a line."""
        if self.group_size:
            return self.storage.record_groups * self.group_size
        return 8 * LINE_BYTES // (TILE_ROWS * self.storage.bits)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record of 16 rows: whole lines."""
        return round_up(TILE_ROWS * self.bytes_of(self._record_columns), LINE_BYTES)

    def tile_records(self, cols: int) -> int:
        """Return the number of records in a tile of 16 rows."""
        return -(-cols // self._record_columns)

    def padded_columns(self, cols: int) -> int:
        """Return the columns of a tile's records, those of padding included."""
        return self.tile_records(cols) * self._record_columns

    def tile_bytes(self, cols: int) -> int:
        """Return the bytes of a tile of 16 rows in layout tile16."""
        return self.tile_records(cols) * self.record_bytes

    def part_bytes(self, cols: int) -> int:
        """Return the bytes of a neuron's gate row, up row or down column: codes, scales, padding to a line."""
        return round_up(self.bytes_of(round_up(cols, self.group_size)), LINE_BYTES)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor, padding of rows, columns and groups included.

        Parameters
        ----------
        shape : tuple of int
            (rows, cols) for tile16, (intermediate_size, parts of a neuron, hidden_size) for neuron, (n,) for
            plain. Parts are 3, or 2 where there is no gate.

        Raises
        ------
        BundleError
            For an unknown combination, a shape that the layout cannot have, or a size beyond 2^63 - 1 bytes.
        """
        return _nbytes(self, tuple(shape))

    def __str__(self) -> str:
        kind = f"{self.dtype}g{self.group_size}" if self.group_size else self.dtype
        return f"{kind} by neuron" if self.layout == "neuron" else kind


@lru_cache(1024)  # the layers of a model have a few shapes
def _nbytes(stored: WeightType, shape: tuple[int, ...]) -> int:
    stored.checked()
    if len(shape) != LAYOUTS[stored.layout] or (stored.layout == "neuron" and shape[1] not in (2, 3)):
        raise BundleError(f"shape {list(shape)} does not fit layout {stored.layout}.")
    if not all(1 <= n <= MAX_DIMENSION for n in shape):
        raise BundleError(f"shape {list(shape)} is out of range; each dimension is from 1 to {MAX_DIMENSION}.")
    if stored.storage.nested and shape[1] % SUPER_COLUMNS:
        raise BundleError(f"shape {list(shape)} does not fit type {stored.dtype}, whose rows are whole blocks of "
                          f"{SUPER_COLUMNS} columns.")
    if stored.layout == "plain":
        nbytes = stored.bytes_of(shape[0])
    elif stored.layout == "neuron":
        nbytes = shape[0] * shape[1] * stored.part_bytes(shape[2])
    else:
        nbytes = -(-shape[0] // TILE_ROWS) * stored.tile_bytes(shape[1])
    if nbytes > MAX_BYTES - (1 << 20):  # room for alignment
        raise BundleError(f"shape {list(shape)} needs {nbytes} bytes, more than a 64-bit offset can address.")
    return nbytes


@dataclass(frozen=True)
class KvType:
    """How the rows of the KV cache are stored: K or V of one head and token."""

    bits: int
    """Bits of an element."""
    scale_bytes: int = 0
    """Bytes of a row's scale; scales lie apart from the elements."""

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of a row of so many elements (a padded head), its scale included."""
        return elements * self.bits // 8 + self.scale_bytes


KV_TYPES = {"int8": KvType(8, scale_bytes=2), "f16": KvType(16), "f32": KvType(32)}
