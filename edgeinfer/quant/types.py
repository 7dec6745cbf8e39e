"""Storage type of one weight: a row of the table of storage types, a group size and a layout."""

from __future__ import annotations

from functools import lru_cache

from ..base.dataclass import dataclass
from ..base.units import MAX_BYTES, round_up
from ..errors import BundleError
from .table import LAYOUTS, LINE_BYTES, MAX_DIMENSION, SUPER_COLUMNS, TILE_ROWS, TYPES, StorageType

GROUP_SIZES = tuple(sorted({group for row in TYPES.values() if row.requested and row.groups[1:]
                            for group in row.groups}))
"""Choices, of types that have several."""


def requestable() -> tuple[str, ...]:
    """Return the names of the types that floats can be quantised to; the others come from files."""
    return tuple(name for name, row in TYPES.items() if row.requested)


def holds(layout: str) -> tuple[str, ...]:
    """Return the names of the types that a layout can hold."""
    return tuple(name for name, row in TYPES.items() if layout in row.layouts)


def embedding_type(weights: str) -> str:
    """Return the type that embedding and head have by default, where matrices have the type `weights`."""
    return "int8" if TYPES[weights].quantised else weights


@dataclass(frozen=True)
class WeightType:
    """Storage type of one weight: a row of the table, a group size and a layout."""

    dtype: str
    """Name of the row, such as q4."""
    group_size: int = 0
    """Columns that share one scale; 0 for floats."""
    layout: str = "tile16"
    """tile16, neuron or plain (vectors)."""
    levels: tuple[int, ...] = ()
    """Table of a tensor whose type has none of its own (`StorageType.fitted`); empty where it is not known yet."""
    outliers: int = 0
    """Columns of outliers, zeros here, that a matrix of its own has in f16 (arXiv 2208.07339)."""

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
            The sentence names the value and the permitted ones.
        """
        if self.layout not in LAYOUTS:
            raise BundleError(f"layout {self.layout!r} is unknown; this version reads {', '.join(LAYOUTS)}.")
        if self.dtype not in holds(self.layout):
            raise BundleError(f"type {self.dtype!r} does not exist in layout {self.layout}; it holds "
                              f"{', '.join(holds(self.layout))}.")
        groups = [str(group) for group in (self.storage.neuron_groups if self.layout == "neuron" else
                                           self.storage.groups)]
        if groups and str(self.group_size) not in groups:
            several = f"{', '.join(groups[:-1])} or " if groups[1:] else ""
            where = " in layout neuron" if self.layout == "neuron" else ""
            raise BundleError(f"group size {self.group_size} is unknown{where}; {self.dtype} has groups of "
                              f"{several}{groups[-1]}.")
        if not groups and self.group_size != 0:
            raise BundleError(f"group size {self.group_size} makes no sense for {self.dtype}; it must be 0.")
        if self.levels and not self._has_levels:
            raise BundleError(f"the levels {list(self.levels)!r:.60} do not fit {self.dtype}.")
        return self

    @property
    def _has_levels(self) -> bool:
        """True if the levels are as many as there are codes, and int8."""
        row = self.storage
        return row.fitted and len(self.levels) == 1 << row.bits and max(map(abs, self.levels)) <= 127

    @property
    def table(self) -> tuple[int, ...]:
        """Level of each code: of the tensor or of its type; empty where codes are levels."""
        return self.levels or self.storage.table

    @property
    def storage(self) -> StorageType:
        """The row of the table."""
        return TYPES[self.dtype]

    @property
    def quantised(self) -> bool:
        """True if the kernels multiply int8 activations."""
        return self.storage.quantised

    @property
    def input_group(self) -> int:
        """Columns of activations that share a scale where they are multiplied by this; 0: they are floats."""
        return self.storage.input_group(self.group_size) if self.quantised else 0

    @property
    def suffix(self) -> str:
        """Return the suffix of the names of its kernels: ``q4_g32``, ``f16``."""
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
            return self.storage.record_groups(self.group_size) * self.group_size
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
            plain. Parts are 3, or 2 if there is no gate.

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
