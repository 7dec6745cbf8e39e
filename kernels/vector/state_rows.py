"""Rows of a recurrent state: updates by a token, and reads by the next one; tiles of a few vectors."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import F32, VF, F32x16, Tile, literal, per_row, pointer, row, splat
from .targets import emit_fma


@intrinsic(prefer_literal=True)
def load_tile(context, n, address):
    """n vectors of 16 floats, one after the other; n is a constant."""
    count = literal(n)
    if count is None:
        return None
    tile = Tile(F32x16, count)

    def lower(context, b, sig, args):
        def step(b, v, i):
            return b.load(pointer(b, args[1], 64 * i), typ=VF, align=4)

        return per_row(b, tile, ir.Constant(tile.llvm, ir.Undefined), step)

    return tile(n, address), lower


@intrinsic
def changed_row(context, change, address, factor, decay):
    """decay * the row at `address` + change * the f32 at `factor`; the decay is a vector or the address of an f32."""
    if not isinstance(change, Tile) or decay not in (F32x16, types.int64):
        return None

    def lower(context, b, sig, args):
        by = splat(b, b.load(pointer(b, args[2]), typ=F32, align=4), VF)
        kept = args[3] if decay == F32x16 else splat(b, b.load(pointer(b, args[3]), typ=F32, align=4), VF)

        def step(b, v, i):
            stored = b.load(pointer(b, args[1], 64 * i), typ=VF, align=4)
            return emit_fma(b, by, v, b.fmul(kept, stored))

        return per_row(b, change, args[0], step)

    return change(change, address, factor, decay), lower


@intrinsic
def add_read(context, sums, row_tile, factor, apart):
    """Add a row to sums, times one f32 for each of them: that at `factor`, and those `apart` bytes after."""
    if not isinstance(sums, Tile) or not isinstance(row_tile, Tile):
        return None

    def lower(context, b, sig, args):
        n = row_tile.n
        by = [splat(b, b.load(pointer(b, row(b, args[2], args[3], i)), typ=F32, align=4), VF)
              for i in range(sums.n // n)]
        return per_row(b, sums, args[0],
                       lambda b, v, i: emit_fma(b, by[i // n], b.extract_value(args[1], i % n), v))

    return sums(sums, row_tile, factor, apart), lower


@intrinsic
def add_tiles(context, one, other):
    """Sum of two tiles, vector by vector."""
    if not isinstance(one, Tile) or one != other:
        return None

    def lower(context, b, sig, args):
        return per_row(b, one, args[0], lambda b, v, i: b.fadd(v, b.extract_value(args[1], i)))

    return one(one, other), lower


@intrinsic(prefer_literal=True)
def vector_of(context, tile, i):
    """Vector i of a tile; i is a constant."""
    number = literal(i)
    if number is None or not isinstance(tile, Tile):
        return None
    return F32x16(tile, i), lambda context, b, sig, args: b.extract_value(args[0], number)


@intrinsic(prefer_literal=True)
def with_vector(context, tile, i, vector):
    """The tile with another vector i; i is a constant."""
    number = literal(i)
    if number is None or not isinstance(tile, Tile) or vector != F32x16:
        return None
    return tile(tile, i, vector), lambda context, b, sig, args: b.insert_value(args[0], args[2], number)
