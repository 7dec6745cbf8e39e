"""Initializers of an ONNX model, produced from a bundle block by block while the file is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain
from edgeinfer.bundle import Bundle
from edgeinfer.errors import BundleError
from edgeinfer.graph import ModelConfig, Weight, rope_tables
from edgeinfer.quant import TILE_ROWS, WeightType

from .codes import Bytes, dense_columns, part_codes, part_scales, part_values, tile_codes, tile_scales
from .flavour import Heads

BLOCK_BYTES = 4 << 20
"""Of a bundle, read at a time."""
WHOLE = 1 << 62
KINDS: dict[str, np.dtype[Any]] = {"u8": np.dtype("u1"), "f16": np.dtype("<f2"), "f32": np.dtype("<f4"),
                                    "i32": np.dtype("<i4")}


class Reader:
    """Reads parts of a bundle's tensors with plain reads: pages of its mapping would count as the process's memory."""

    def __init__(self, bundle: Bundle):
        self._bundle, self._file = bundle, open_plain(bundle.weights_path)

    def __call__(self, name: str, offset: int, nbytes: int) -> Bytes:
        """Return bytes of a tensor, from `offset` in it on."""
        try:
            self._file.seek(self._bundle.tensors[name].offset + offset)
            data = self._file.read(nbytes)
        except OSError as error:
            raise BundleError(f"{self._bundle.weights_path} can no longer be read: {error.strerror or error}; check "
                              "its disk.") from None
        if len(data) < nbytes:
            raise BundleError(f"Cannot use the bundle {self._bundle.path}: weights.bin was cut while it was read.")
        return np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Stored(NamedTuple):
    """A tensor of the model; `pieces` makes its data, in order, for the writer."""

    name: str
    kind: str
    """One of KINDS."""
    shape: tuple[int, ...]
    pieces: Callable[[Reader], Iterator[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * KINDS[self.kind].itemsize


class Quantised(NamedTuple):
    """The two tensors of a quantised matrix."""

    codes: Stored
    scales: Stored
    bits: int
    group_size: int


class Part(NamedTuple):
    """Rows of a matrix in layout tile16: those of every `step`-th tile from the `first` on."""

    weight: Weight
    stored: WeightType
    rows: int
    name: str
    first: int = 0
    step: int = 1

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return self.weight.shape[1]

    def tiles(self, read: Reader, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, Bytes]]:
        """Yield tiles, (n, bytes of a tile), with the number of their rows that are not padding."""
        size, left = self.stored.tile_bytes(self.columns), self.rows
        total = -(-self.weight.shape[0] // TILE_ROWS)
        n = max(1, block_bytes // size // self.step) * self.step
        for start in range(0, total, n):
            tiles = read(self.weight.name, start * size, min(n, total - start) * size).reshape(-1, size)
            tiles = tiles[self.first :: self.step]
            yield min(left, len(tiles) * TILE_ROWS), tiles
            left -= min(left, len(tiles) * TILE_ROWS)


def quantised(part: Part, dtype: str) -> Quantised:
    """Codes and scales of a q4 or int8 matrix; the scales in the type of the graph."""

    def made(make: Callable[[Bytes, WeightType, int], NDArray[Any]]) -> Callable[[Reader], Iterator[NDArray[Any]]]:
        return lambda read: (make(tiles, part.stored, part.columns)[:n] for n, tiles in part.tiles(read))

    return _pair(part.name, part.rows, part.columns, part.stored, dtype, made(tile_codes), made(tile_scales))


def gates(weight: Weight, stored: WeightType, which: int, name: str, dtype: str) -> Quantised:
    """As `quantised`, of the gate (0) or up (1) rows of an FFN stored neuron by neuron."""
    neurons, _, hidden = weight.shape

    def made(make: Callable[[Bytes, WeightType, int], NDArray[Any]]) -> Callable[[Reader], Iterator[NDArray[Any]]]:
        return lambda read: (make(parts, stored, hidden) for parts in _parts(read, weight, stored, which))

    return _pair(name, neurons, hidden, stored, dtype, made(part_codes), made(part_scales))


def down(weight: Weight, stored: WeightType, name: str, dtype: str) -> Stored:
    """The down columns of an FFN stored neuron by neuron, as floats: (neurons, hidden_size).

    Their groups are along the outputs, which no operator of 4 or 8 bits can have.
    """
    neurons, _, hidden = weight.shape
    return Stored(name, dtype, (neurons, hidden),
                  lambda read: (part_values(parts, stored, hidden) for parts in _parts(read, weight, stored, 2)))


def dense(part: Part, dtype: str) -> Stored:
    """An f16 or f32 matrix, transposed: (columns, rows)."""

    def pieces(read: Reader) -> Iterator[NDArray[Any]]:
        ((_, tiles),) = part.tiles(read, WHOLE)
        n = max(1, BLOCK_BYTES // (len(tiles) * TILE_ROWS * 4))
        for column in range(0, part.columns, n):
            last = min(column + n, part.columns)
            yield dense_columns(tiles, part.stored, part.columns, column, last)[:, : part.rows]

    return Stored(part.name, dtype, (part.columns, part.rows), pieces)


def vector(weight: Weight, dtype: str, start: int = 0, count: int = 0, name: str = "") -> Stored:
    """A norm or a bias, or `count` of its elements."""
    n = count or weight.shape[0]
    return Stored(name or weight.name, dtype, (n,), lambda read: iter([read(weight.name, 4 * start, 4 * n)
                                                                       .view("<f4")]))


def order(weight: Weight) -> Stored:
    """Return the permutation of a matrix's columns: the input element that each one multiplies."""
    return Stored(weight.name, "i32", weight.shape, lambda read: iter([read(weight.name, 0, 4 * weight.shape[0])
                                                                       .view("<i4")]))


def half_vector(weight: Weight, which: int, n: int, name: str, dtype: str) -> Stored:
    """The gate's (0) or up's (1) half of a bias that alternates by tile of 16 rows."""

    def pieces(read: Reader) -> Iterator[NDArray[Any]]:
        both = read(weight.name, 0, 4 * weight.shape[0]).view("<f4").reshape(-1, 2, TILE_ROWS)
        yield both[:, which].reshape(-1)[:n]

    return Stored(name, dtype, (n,), pieces)


def rope(config: ModelConfig, ctx: int, which: int, dtype: str) -> Stored:
    """The table of cosines (0) or sines (1), the runtime's own: (ctx, half of a head), padded as heads are."""
    heads = Heads.of(config)
    width = heads.stored_dim // 2

    def pieces(read: Reader) -> Iterator[NDArray[Any]]:
        table = rope_tables(config.rope, heads.dim, ctx)[which]
        yield np.pad(table, ((0, 0), (0, width - heads.dim // 2))) if heads.padded else table

    return Stored(("cos", "sin")[which], dtype, (ctx, width), pieces)


def _pair(name: str, rows: int, columns: int, stored: WeightType, dtype: str,
          codes: Callable[[Reader], Iterator[NDArray[Any]]],
          scales: Callable[[Reader], Iterator[NDArray[Any]]]) -> Quantised:
    bits, group = stored.storage.bits, stored.group_size
    groups = -(-columns // group)
    return Quantised(Stored(f"{name}.codes", "u8", (rows, groups, group * bits // 8), codes),
                     Stored(f"{name}.scales", dtype, (rows, groups), scales), bits, group)


def _parts(read: Reader, weight: Weight, stored: WeightType, which: int) -> Iterator[Bytes]:
    """Gates (0), up rows (1) or down columns (2), (neurons, bytes of a part), some neurons at a time."""
    neurons, size = weight.shape[0], stored.part_bytes(weight.shape[2])
    n = max(1, BLOCK_BYTES // (2 * size))
    for start in range(0, neurons, n):
        count = min(n, neurons - start)
        if which == 0:
            yield read(weight.name, start * size, count * size).reshape(count, size)
        else:
            both = read(weight.name, (neurons + 2 * start) * size, 2 * count * size)
            yield both.reshape(count, 2, size)[:, which - 1]
