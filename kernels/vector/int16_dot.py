"""Sums of int8 rows times int16 weights, two rows at a time; exact in 32 bits on every instruction set.

256 weights of up to WEIGHT_MAX in size times codes of up to 127 stay below 2^31.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .neon import LANES, WORDS, pick
from .simd import (
    F32,
    I8,
    I16,
    I32,
    VF,
    VI,
    F32x16,
    I32x16,
    Tile,
    call,
    define,
    half,
    join,
    literal,
    per_row,
    pointer,
    row,
    splat,
)
from .targets import has

WEIGHT_MAX = 32767
_ROW, _WORDS, _PAIRS = ir.VectorType(I8, 16), ir.VectorType(I16, 16), ir.VectorType(I16, 32)
_EIGHT, _TWO = ir.VectorType(I32, 8), ir.VectorType(I16, 2)


@define(types.none, types.int64, I32x16)
def store_i16x16(b, address, v):
    """16 values as int16."""
    b.store(b.trunc(v, _WORDS), pointer(b, address), align=2)


@intrinsic(prefer_literal=True)
def zero_sums(context, n):
    """n vectors of 16 zeros (int32); n is a constant."""
    count = literal(n)
    if count is None:
        return None
    tile = Tile(I32x16, count)
    return tile(n), lambda context, builder, sig, args: ir.Constant(tile.llvm, None)


def _sums_in_pairs(b, acc, vectors, weights, rows):
    """x86: both rows interleaved, so that an instruction multiplies and adds neighbours."""
    pairs = [b.sext(pick(b, *two, [i // 2 + 16 * (i % 2) for i in range(32)]), _PAIRS) for two in vectors]
    weights = [splat(b, w, VI) for w in weights]
    for k in range(len(vectors) * rows):
        v, w, total = b.bitcast(pairs[k // rows], VI), weights[k % rows], b.extract_value(acc, k)
        if has("avx512vnni"):
            total = call(b, "llvm.x86.avx512.vpdpwssd.512", VI, total, v, w)
        else:
            halves = ((b.bitcast(half(b, x, at, 8), _WORDS) for x in (v, w)) for at in (0, 8))
            products = [call(b, "llvm.x86.avx2.pmadd.wd", _EIGHT, *two) for two in halves]
            total = b.add(total, join(b, *products))  # of few chains, so faster than AVX-VNNI's instruction
        acc = b.insert_value(acc, total, k)
    return acc


def _sums_in_turn(b, acc, vectors, weights, rows):
    """One row after the other; NEON's smlal takes the weight from a lane."""
    weights = [b.bitcast(w, _TWO) for w in weights]
    for i, two in enumerate(vectors):
        for j, codes in enumerate(two):
            low, high = (b.sext(half(b, codes, at, 8), WORDS) for at in (0, 8))
            for t in range(rows):
                total = b.extract_value(acc, i * rows + t)
                if has("neon"):
                    w = pick(b, weights[t], weights[t], [j] * 4)
                    parts = [call(b, "llvm.aarch64.neon.smull.v4i32", LANES, half(b, words, at, 4), w)
                             for words in (low, high) for at in (0, 4)]
                    products = join(b, join(b, *parts[:2]), join(b, *parts[2:]))
                else:
                    scalar = b.sext(b.extract_element(weights[t], ir.Constant(I32, j)), I32)
                    products = b.mul(b.sext(codes, VI), splat(b, scalar, VI))
                acc = b.insert_value(acc, b.add(total, products), i * rows + t)
    return acc


@intrinsic(prefer_literal=True)
def add_weighted_pair(context, acc, n, address, stride, p, p_stride):
    """Add two rows of int8, a stride apart, times two int16 to m vectors x n rows of sums, vector by vector.

    Vector i has the elements from 16 i on; the two int16 of row t of the sums are at p + t * p_stride.
    """
    rows = literal(n)
    if rows is None or not isinstance(acc, Tile):
        return None

    def lower(context, b, sig, args):
        vectors = [[b.load(pointer(b, at, 16 * i), typ=_ROW, align=1) for at in (args[2], b.add(args[2], args[3]))]
                   for i in range(acc.n // rows)]
        weights = [b.load(pointer(b, row(b, args[4], args[5], t)), typ=I32, align=4) for t in range(rows)]
        make = _sums_in_pairs if has("avx2") else _sums_in_turn
        return make(b, args[0], vectors, weights, rows)

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
