"""Steps from an element of a checkpoint's tensor to one of a weight: on shapes, positions and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base.dataclass import dataclass

if TYPE_CHECKING:
    from .weights import Source

Sizes = tuple[int, ...]
Read = Callable[["Source", Any], Any]
"""Reads the elements of a vector that an array of indices names."""


class Step:
    """Effect of one step on a matrix (a vector has a single column): on its shape, its positions and its values.

    Rows and columns are arrays of indices, values an array (rows, columns). The steps only calculate with them, so that
    a graph can be built without NumPy.
    """

    def shape(self, shape: Sizes) -> Sizes:
        """Return the shape after the step."""
        return shape

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Return the rows and columns before the step that become `rows` and `columns`."""
        return rows, columns

    def apply(self, values: Any, rows: Any, columns: Any, read: Read) -> Any:
        """Return the values of `rows` and `columns` after the step, from those of their origin."""
        return values


@dataclass(frozen=True)
class Rows(Step):
    """Keep the first `run` of every `step` rows, counted from row `start` on: `count` rows in all."""

    start: int
    count: int
    run: int
    step: int

    def shape(self, shape: Sizes) -> Sizes:
        """Return the shape of the rows that are kept."""
        return (self.count, *shape[1:])

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Skip the omitted rows or columns."""
        return self.start + rows // self.run * self.step + rows % self.run, columns


@dataclass(frozen=True)
class RopeHalves(Step):
    """Reorder the rows of each head from pairs (0, 1), (2, 3), ... to halves: the even ones, then the odd ones."""

    head_dim: int
    turned: int = 0
    """Rows of a head that are reordered, the first ones; 0 = all."""

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Row i of a first half was row 2 i of its head, of a second half 2 i + 1; rows after both stay."""
        turned, i = self.turned or self.head_dim, rows % self.head_dim
        half = turned // 2
        return rows + (i < turned) * (i % half * 2 + i // half - i), columns


@dataclass(frozen=True)
class Transposed(Step):
    """Make rows of columns."""

    def shape(self, shape: Sizes) -> Sizes:
        """Return the sizes the other way round."""
        return shape[::-1]

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Exchange the two."""
        return columns, rows

    def apply(self, values: Any, rows: Any, columns: Any, read: Read) -> Any:
        """Transpose the block."""
        return values.T


@dataclass(frozen=True)
class Columns(Step):
    """Keep `count` columns of a matrix, from column `start` on."""

    start: int
    count: int

    def shape(self, shape: Sizes) -> Sizes:
        """Return the shape of the columns that are kept."""
        return (shape[0], self.count)

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Skip the columns before."""
        return rows, columns + self.start


@dataclass(frozen=True)
class Affine(Step):
    """Multiply by a number, then add one."""

    scale: float = 1.0
    plus: float = 0.0

    def apply(self, values: Any, rows: Any, columns: Any, read: Read) -> Any:
        """Calculate in the values' own type."""
        return values * self.scale + self.plus


@dataclass(frozen=True)
class Tap(Step):
    """Keep one column of a depthwise convolution, (channels, 1, width), as a vector."""

    column: int

    def shape(self, shape: Sizes) -> Sizes:
        """Return the number of channels."""
        return shape[:1]

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Take the column."""
        return rows, columns * 0 + self.column


@dataclass(frozen=True)
class Decay(Step):
    """-e^x, the rate at which a state decays, of its logarithm."""

    def apply(self, values: Any, rows: Any, columns: Any, read: Read) -> Any:
        """Calculate in the values' own type."""
        import numpy as np

        return -np.exp(values)


@dataclass(frozen=True)
class HeadOrder(Step):
    """Put heads back that llama.cpp's converter stores in turns: of each group the first, of each the second, ....

    Rows or columns before `start` stay. Head j of group g was head j x groups + g.
    """

    groups: int
    heads: int
    """Number of heads of a group."""
    size: int
    """Elements of a head."""
    start: int = 0
    axis: str = "rows"

    def origin(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Find the head in turn."""
        if self.axis == "columns":
            return rows, self.position(columns)
        return self.position(rows), columns

    def position(self, i: Any) -> Any:
        """Return where elements were."""
        head, within = (i - self.start) // self.size, (i - self.start) % self.size
        found = self.start + (head % self.heads * self.groups + head // self.heads) * self.size + within
        return i + (i >= self.start) * (found - i)


@dataclass(frozen=True)
class Factors(Step):
    """Multiply each of the rows, or each of the columns, by its element of a vector."""

    by: Source
    axis: str
    """``rows`` or ``columns``."""

    def apply(self, values: Any, rows: Any, columns: Any, read: Read) -> Any:
        """Read the vector's elements that this block needs."""
        return values * (read(self.by, rows)[:, None] if self.axis == "rows" else read(self.by, columns))
