"""Initializers made of the matrices of all experts, which a bundle has one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.graph import Weight
from edgeinfer.quant import TILE_ROWS

from .codes import Bytes, dense_columns, tile_blocks
from .weights import BLOCK_BYTES, Part, Quantised, Reader, Stored, blocked


class Stack(NamedTuple):
    """Matrices of all experts with the same rows and columns, one after the other in tiles of 16 rows."""

    part: Part
    experts: int
    rows: int
    """Rows of an expert, without padding."""

    def tiles(self, read: Reader) -> Iterator[list[Bytes]]:
        """Yield the same tiles of all experts, some at a time."""
        stored, name = self.part.stored, self.part.weight.name
        size = stored.tile_bytes(self.part.columns)
        each = -(-self.rows // TILE_ROWS)
        n = max(1, BLOCK_BYTES // size // self.experts)
        for start in range(0, each, n):
            count = min(n, each - start)
            yield [read(name, (expert * each + start) * size, count * size).reshape(count, size)
                   for expert in range(self.experts)]


def beside(stack: Stack, dtype: str) -> Quantised:
    """Quantised matrices of all experts side by side, as one of rows x (experts x columns): sums over experts are
    its products. Each expert's columns are padded to whole groups.
    """
    part = stack.part
    groups = -(-part.columns // part.stored.group_size)

    def rows(which: int) -> Callable[[Reader], Iterator[NDArray[Any]]]:
        def made(read: Reader) -> Iterator[NDArray[Any]]:
            left = stack.rows
            for tiles in stack.tiles(read):
                found: list[Any] = [tile_blocks(one, part.stored, part.columns)[which] for one in tiles]
                yield np.concatenate(found, axis=1)[:left]
                left -= len(found[0])
        return made

    return blocked(part.name, stack.rows, stack.experts * groups * part.stored.group_size, part.stored, dtype,
                   rows(0), rows(1), rows(2))


def dense_beside(stack: Stack, dtype: str) -> Stored:
    """Return matrices that are not quantised, as `beside` those that are, transposed: (experts x columns, rows)."""
    part, each = stack.part, -(-stack.rows // TILE_ROWS)

    def pieces(read: Reader) -> Iterator[NDArray[Any]]:
        for _, tiles in part.tiles(read, each * part.stored.tile_bytes(part.columns)):
            yield dense_columns(tiles, part.stored, part.columns, 0, part.columns)[:, : stack.rows]

    return Stored(part.name, dtype, (stack.experts * part.columns, stack.rows), pieces)


def expert_vectors(weight: Weight, experts: int, rows: int, dtype: str) -> Stored:
    """Biases of all experts: (experts, rows)."""
    return Stored(weight.name, dtype, (experts, rows), lambda read: iter([
        read(weight.name, 0, 4 * weight.shape[0]).view("<f4").reshape(experts, -1)[:, :rows]]))
