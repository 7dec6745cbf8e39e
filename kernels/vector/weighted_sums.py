"""Sums of int8 codes times weights of 7 bits, four products a lane; exact on every instruction set.

Codes come in lines of 4 tokens x 16 elements, so that one instruction takes four tokens' part of 16 sums. Weights are
0 .. 127: twice 127 x 127 fits 16 bits, where instruction sets without dot products of bytes add pairs.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from . import neon
from .int8_dot import dot_u8_line
from .simd import F32, I8, I32, VB, VF, VI, F32x16, I32x16, Tile, define, literal, per_row, pointer, row, splat
from .targets import has

WEIGHT_MAX = 127
_WEIGHTS = ir.VectorType(I8, 16)


@define(types.none, types.int64, F32x16)
def store_weights(b, address, v):
    """16 floats in [0, WEIGHT_MAX] to the nearest int8, ties to even: a sum with 1.5 * 2^23 ends in the integer."""
    bits = b.bitcast(b.fadd(v, ir.Constant(VF, [12582912.0] * 16)), VI)
    b.store(b.trunc(bits, _WEIGHTS), pointer(b, address), align=1)


@intrinsic(prefer_literal=True)
def zero_sums(context, n):
    """n vectors of 16 zeros (int32); n is a constant."""
    count = literal(n)
    if count is None:
        return None
    tile = Tile(I32x16, count)
    return tile(n), lambda context, builder, sig, args: ir.Constant(tile.llvm, None)


def _fours(b, p, p_stride, rows):
    """The weights of each row for the four lines of a block, as ``fours(row, line)``."""
    rows_at = [row(b, p, p_stride, t) for t in range(rows)]
    if has("neon"):  # sdot takes them from a lane
        whole = [b.bitcast(b.load(pointer(b, at), typ=_WEIGHTS, align=1), neon.LANES) for at in rows_at]
        return lambda t, line: b.bitcast(neon.pick(b, whole[t], whole[t], [line] * 4), neon.BYTES)
    return lambda t, line: b.bitcast(splat(b, b.load(pointer(b, rows_at[t], 4 * line), typ=I32, align=4), VI), VB)


def _add(b, total, line, four):
    """Sums of 16 elements plus those of four tokens."""
    if has("neon"):
        return neon.dot_line(b, neon.by_sdot if has("dotprod") else neon.by_smull, total, line, four)
    return dot_u8_line(b, total, four, line)


@intrinsic(prefer_literal=True)
def add_weighted(context, acc, n, address, stride, p, p_stride):
    """Add a block's 16 rows of int8 times 16 weights to m vectors x n rows of sums, vector by vector.

    Of four tokens the lines of elements 16 i .. are side by side, those of the next four a stride after; the 16 weights
    (int8) of row t of the sums are at p + t * p_stride.
    """
    rows = literal(n)
    if rows is None or not isinstance(acc, Tile):
        return None

    def lower(context, b, sig, args):
        sums, fours = [b.extract_value(args[0], k) for k in range(acc.n)], _fours(b, args[4], args[5], rows)
        for line in range(4):
            at = row(b, args[2], args[3], line)
            lines = [b.load(pointer(b, at, 64 * i), typ=VB, align=64) for i in range(acc.n // rows)]
            for t in range(rows):
                four = fours(t, line)
                for i, codes in enumerate(lines):
                    sums[i * rows + t] = _add(b, sums[i * rows + t], codes, four)
        out = args[0]
        for k, v in enumerate(sums):
            out = b.insert_value(out, v, k)
        return out

    return acc(acc, n, address, stride, p, p_stride), lower


@intrinsic(prefer_literal=True)
def scale_sums(context, acc, n, scales):
    """Sums of m vectors x n rows as floats: those of row t times the float32 at scales + 4 t."""
    rows = literal(n)
    if rows is None or not isinstance(acc, Tile):
        return None
    tile = Tile(F32x16, acc.n)

    def lower(context, b, sig, args):
        factors = [splat(b, b.load(pointer(b, args[2], 4 * t), typ=F32, align=4), VF) for t in range(rows)]

        def step(b, v, k):
            return b.fmul(b.sitofp(b.extract_value(args[0], k), VF), factors[k % rows])

        return per_row(b, tile, ir.Constant(tile.llvm, ir.Undefined), step)

    return tile(acc, n, scales), lower
