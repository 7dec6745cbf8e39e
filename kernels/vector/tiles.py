"""Register blocks: tiles of accumulators that are loaded, stored and added as wholes."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .simd import I64, VB, VF, F32x16, I8x64, Tile, literal, per_row, pointer, row, row_tile


@intrinsic(prefer_literal=True)
def zero_tile(context, n):
    """n vectors of 16 zeros (f32); n is a constant."""
    count = literal(n)
    if count is None:
        return None
    tile = Tile(F32x16, count)
    return tile(n), lambda context, builder, sig, args: ir.Constant(tile.llvm, None)


@intrinsic(prefer_literal=True)
def load_lines(context, m, address, apart):
    """A line of each of m row tiles (`simd.row_tile`); m is a constant."""
    count = literal(m)
    if count is None:
        return None
    tile = Tile(I8x64, count)

    def lower(context, b, sig, args):
        def step(b, v, i):
            return b.load(pointer(b, row_tile(b, args[1], args[2], i)), typ=VB, align=64)

        return per_row(b, tile, ir.Constant(tile.llvm, ir.Undefined), step)

    return tile(m, address, apart), lower


@intrinsic
def store_tile(context, tile, address, stride):
    """Rows of 16 floats, `stride` bytes apart: one vector of the tile each."""
    if not isinstance(tile, Tile):
        return None

    def lower(context, b, sig, args):
        for t in range(tile.n):
            b.store(b.extract_value(args[0], t), pointer(b, row(b, args[1], args[2], t)), align=4)
        return context.get_dummy_value()

    return types.none(tile, address, stride), lower


def _addresses(b, n, tile, address, stride, apart):
    """Pointers to the vectors of a block of n tokens: k is row tile k // n, and in it token k % n, a stride on each."""
    return [pointer(b, row(b, row_tile(b, address, apart, k // n), stride, k % n)) for k in range(tile.n)]


def _store(b, n, tile, value, *addresses):
    for k, at in enumerate(_addresses(b, n, tile, *addresses)):
        b.store(b.extract_value(value, k), at, align=4)


@intrinsic(prefer_literal=True)
def store_block(context, m, block, address, stride):
    """Store m row tiles x n tokens of 16 floats: tokens `stride` bytes apart, row tiles side by side."""
    count = literal(m)
    if count is None or not isinstance(block, Tile):
        return None

    def lower(context, b, sig, args):
        _store(b, block.n // count, block, *args[1:], ir.Constant.literal_array([I64(64), I64(128)]))
        return context.get_dummy_value()

    return types.none(m, block, address, stride), lower


@intrinsic(prefer_literal=True)
def store_apart(context, m, block, address, stride, apart):
    """Store a block as `store_block` does, with row tiles at the distances `apart` (`simd.row_tile`)."""
    count = literal(m)
    if count is None or not isinstance(block, Tile):
        return None

    def lower(context, b, sig, args):
        _store(b, block.n // count, block, *args[1:])
        return context.get_dummy_value()

    return types.none(m, block, address, stride, apart), lower


@intrinsic(prefer_literal=True)
def add_block(context, m, block, address, stride, apart):
    """block + the values where `store_apart` would store it (stride 0: one row for all tokens)."""
    count = literal(m)
    if count is None or not isinstance(block, Tile):
        return None

    def lower(context, b, sig, args):
        addresses = _addresses(b, block.n // count, block, *args[2:])
        return per_row(b, block, args[1], lambda b, v, k: b.fadd(b.load(addresses[k], typ=VF, align=4), v))

    return block(m, block, address, stride, apart), lower
