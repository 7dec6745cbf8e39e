"""Initializers of an ONNX model, produced from a bundle block by block while the file is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.bundle import Bundle
from edgeinfer.errors import BundleError
from edgeinfer.graph import ModelConfig, Weight, rope_tables
from edgeinfer.quant import TILE_ROWS, WeightType

from .codes import (
    Blocks,
    Bytes,
    code_bits,
    dense_columns,
    part_codes,
    part_scales,
    part_values,
    tile_blocks,
    tile_values,
)

BLOCK_BYTES = 4 << 20
"""Bytes of a bundle that are read at a time."""
WHOLE = 1 << 62
KINDS: dict[str, np.dtype[Any]] = {"u8": np.dtype("u1"), "f16": np.dtype("<f2"), "f32": np.dtype("<f4"),
                                    "i32": np.dtype("<i4"), "i64": np.dtype("<i8")}


class Reader:
    """Reads parts of a bundle's tensors with plain reads: pages of its mapping would count as the process's memory."""

    def __init__(self, bundle: Bundle):
        self._bundle, self._file = bundle, open_plain(bundle.weights_path)

    def __call__(self, name: str, offset: int, nbytes: int) -> Bytes:
        """Return bytes of a tensor, from `offset` in it on; those of experts are in pieces, with others between."""
        entry = self._bundle.tensors[name]
        each = entry.nbytes // max(1, entry.pieces)
        data = b"".join(self._read(entry.offset + offset // each * entry.stride + offset % each, n)
                        for offset, n in _within(offset, nbytes, each))
        return np.frombuffer(data, np.uint8)

    def _read(self, at: int, nbytes: int) -> bytes:
        with os_errors(BundleError, f"{self._bundle.weights_path} can no longer be read", "; check its disk."):
            self._file.seek(at)
            data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise BundleError(f"Cannot use the bundle {self._bundle.path}: weights.bin was cut while it was read.")
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _within(offset: int, nbytes: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that are within a piece: where they begin, and their bytes."""
    end = offset + nbytes
    while offset < end:
        n = min(end, (offset // each + 1) * each) - offset
        yield offset, n
        offset += n


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
    """The tensors of a quantised matrix."""

    codes: Stored
    scales: Stored
    bits: int
    group_size: int
    offsets: Stored | None = None
    """Offsets of blocks of weights with minima: (groups, rows)."""


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
        """Number of columns of the matrix."""
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
    """Codes, scales and offsets of a quantised matrix; scales and offsets in the type of the graph."""

    def blocks(read: Reader) -> Iterator[tuple[int, Blocks]]:
        return ((n, tile_blocks(tiles, part.stored, part.columns)) for n, tiles in part.tiles(read))

    return blocked(part.name, part.rows, part.columns, part.stored, dtype,
                   lambda read: (found.codes[:n] for n, found in blocks(read)),
                   lambda read: (found.scales[:n] for n, found in blocks(read)),
                   lambda read: (found.offsets[:n] for n, found in blocks(read) if found.offsets is not None))


def gates(weight: Weight, stored: WeightType, which: int, name: str, dtype: str) -> Quantised:
    """Return the gate (0) or up (1) rows of an FFN stored neuron by neuron, as `quantised` does for matrices."""
    neurons, _, hidden = weight.shape

    def made(make: Callable[[Bytes, WeightType, int], NDArray[Any]]) -> Callable[[Reader], Iterator[NDArray[Any]]]:
        return lambda read: (make(parts, stored, hidden) for parts in _parts(read, weight, stored, which))

    return blocked(name, neurons, hidden, stored, dtype, made(part_codes), made(part_scales))


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


def folded(table: Part, dtype: str) -> Quantised:
    """A table each row of which is a tile of 16 pieces: (rows of the table, groups of all pieces, ...)."""

    def rows(which: int) -> Callable[[Reader], Iterator[NDArray[Any]]]:
        def made(read: Reader) -> Iterator[NDArray[Any]]:
            for _, tiles in table.tiles(read):
                found = tile_blocks(tiles, table.stored, table.columns)[which]
                if found is not None:
                    yield found.reshape(len(tiles), -1)
        return made

    n = table.rows // TILE_ROWS
    one = blocked(table.name, n, TILE_ROWS * -(-table.columns // table.stored.group_size) * table.stored.group_size,
                  table.stored, dtype, rows(0), rows(1))
    if not table.stored.storage.minimum:
        return one
    return one._replace(offsets=Stored(f"{table.name}.offsets", dtype, one.scales.shape, rows(2)))


def dense_rows(part: Part, dtype: str, name: str, shape: tuple[int, ...], transposed: bool = False) -> Stored:
    """The weights of a matrix of any type as floats, rows after rows, in another shape; `transposed` puts columns first
    in each of its last two dimensions, such as those of a matrix of each head.
    """
    rows = shape[-1] if transposed else TILE_ROWS * TILE_ROWS

    def pieces(read: Reader) -> Iterator[NDArray[Any]]:
        for n, tiles in part.tiles(read, rows // TILE_ROWS * part.stored.tile_bytes(part.columns)):
            values = tile_values(tiles, part.stored, part.columns)[:n]
            yield values.reshape(-1, rows, part.columns).transpose(0, 2, 1) if transposed else values

    return Stored(name, dtype, shape, pieces)


def vector(weight: Weight, dtype: str, start: int = 0, count: int = 0, name: str = "") -> Stored:
    """A norm or a bias, or `count` of its elements."""
    n = count or weight.shape[0]
    return Stored(name or weight.name, dtype, (n,), lambda read: iter([read(weight.name, 4 * start, 4 * n)
                                                                       .view("<f4")]))


def convolution(weight: Weight, width: int, dtype: str) -> Stored:
    """Return the weights of a causal convolution, (channels, 1, width): the bundle has those of each token together."""
    shape = weight.shape[0] // width, 1, width
    return Stored(weight.name, dtype, shape, lambda read: iter([
        read(weight.name, 0, 4 * weight.shape[0]).view("<f4").reshape(width, -1).T]))


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


def rope(config: ModelConfig, table: int, width: int, ctx: int, which: int, name: str, dtype: str,
         padded: int = 0) -> Stored:
    """A table of cosines (0) or sines (1), the runtime's own: (ctx, half of the rotated dimensions).

    `width` elements of a head turn, or would if the pairs of a proportional rotation that stand still did; `padded` is
    the half of a head that is wider.
    """
    kind, half = config.rotations[table], width // 2

    def pieces(read: Reader) -> Iterator[NDArray[Any]]:
        found = rope_tables(kind, config.turned(kind), ctx)[which]
        whole = np.full((ctx, padded or half), 1.0 - which, np.float32)
        whole[:, : found.shape[1]] = found
        yield whole

    return Stored(name, dtype, (ctx, padded or half), pieces)


def computed(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]) -> Stored:
    """A tensor that is not in the bundle."""
    return Stored(name, dtype, shape, lambda read: iter([make()]))


def blocked(name: str, rows: int, columns: int, stored: WeightType, dtype: str,
            codes: Callable[[Reader], Iterator[NDArray[Any]]], scales: Callable[[Reader], Iterator[NDArray[Any]]],
            offsets: Callable[[Reader], Iterator[NDArray[Any]]] | None = None) -> Quantised:
    """Return the tensors of a quantised matrix from makers of their rows; there are offsets where the type has minima.
    """
    bits, group = code_bits(stored), stored.group_size
    groups, more = -(-columns // group), None
    if stored.storage.minimum and offsets:
        more = Stored(f"{name}.offsets", dtype, (groups, rows),
                      lambda read: iter([np.concatenate([*offsets(read)]).T]))
    return Quantised(Stored(f"{name}.codes", "u8", (rows, groups, group * bits // 8), codes),
                     Stored(f"{name}.scales", dtype, (rows, groups), scales), bits, group, more)


def _parts(read: Reader, weight: Weight, stored: WeightType, which: int) -> Iterator[Bytes]:
    """Gates (0), up rows (1) or down columns (2), (neurons, bytes of a part), some neurons at a time.

    Up rows of neurons without a gate are where gates are otherwise, and with them are down columns alone.
    """
    (neurons, parts, _), size = weight.shape, stored.part_bytes(weight.shape[2])
    n, more = max(1, BLOCK_BYTES // (2 * size)), parts - 1
    for start in range(0, neurons, n):
        count = min(n, neurons - start)
        if which == 0:
            yield read(weight.name, start * size, count * size).reshape(count, size)
        else:
            both = read(weight.name, (neurons + more * start) * size, more * count * size)
            yield both.reshape(count, more, size)[:, which - 3 + more]
