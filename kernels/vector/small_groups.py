"""Sums of groups of weights that are smaller than the activations' (quant.INPUT_COLUMNS), before the floats.

A group's sum is multiplied by its 8-bit scale while it is an exact integer, so that the groups of a part are scaled and
added as floats once, by the outer scale and the activations'. Where products come as sums of two in 16 bits, the
instruction that widens them multiplies by the scale. Elsewhere floats hold the integers: 2 groups x 16 columns x 32 x
127 x 128 is below 2^24.

Rows of activations have no sums for so small groups. What codes are above their levels is taken off them (`packed`),
or, where bytes of weights must be unsigned, off the start of the sums, from the activations in work. 16 bits hold a
group's sum, and on the way to it whatever is beyond them falls away again.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.extending import intrinsic

from .int8_dot import PairTile, in_pairs, products_tile, vpdpbusd, zero_products, zero_sums
from .packed_formats import FORMS
from .pair_sums import YB, YI, YW, has_pair_sums, pairs_unsigned, wide_pairs
from .simd import (
    I8,
    I16,
    I32,
    VB,
    VF,
    VI,
    I32x16,
    Tile,
    constant,
    half,
    join,
    literal,
    pointer,
    row_tile,
    splat,
)
from .targets import emit_fma, has


def unsigned_codes():
    """Whether weights are multiplied as unsigned bytes: codes then stay above their levels."""
    return has("avx2")


def _lanes(b, v, lanes):
    """As many lanes; further ones are zeros."""
    n = v.type.count
    indices = [min(i, n) for i in range(lanes)]
    return b.shuffle_vector(v, ir.Constant(v.type, None), ir.Constant(ir.VectorType(I32, lanes), indices))


def _offsets(b, x, n, steps, offset):
    """- offset x the sums of the activations of n tokens, a lane each: whole ones, or both of two in 16 bits."""
    words, bytes_, of_words = (YI, YB, YW) if has_pair_sums() else (VI, VB, VI)
    total = constant(of_words, 0)
    for step in range(steps):
        four = b.load(pointer(b, x, 4 * n * step), typ=ir.VectorType(I32, n), align=4)
        four = b.bitcast(_lanes(b, four, words.count) if n < words.count else four, bytes_)
        if has_pair_sums():
            total = b.add(total, pairs_unsigned(b, constant(YB, offset), four))
        else:
            total = vpdpbusd(b, total, constant(VB, offset), four)
    return b.bitcast(b.sub(constant(of_words, 0), total), words)


@cache
def start_of_fine(name: str, group: int):
    """Intrinsic ``(m, n, x)``: what the sums of a group start at, whose activations are at x."""
    form = FORMS[name]

    @intrinsic(prefer_literal=True)
    def start(context, m, n, x):
        row_tiles, tokens = literal(m), literal(n)
        if row_tiles is None or tokens is None:
            return None
        tile = products_tile(I32x16, row_tiles, tokens)

        def lower(context, b, sig, args):
            out = ir.Constant(tile.llvm, None)
            if unsigned_codes():
                offsets = _offsets(b, args[2], tokens, group // 4, form.offset)
                for k in range(tile.n):
                    lane = b.extract_element(offsets, ir.Constant(I32, k % tokens))
                    out = b.insert_value(out, splat(b, lane, VI), k)
            return out

        return tile(m, n, x), lower

    return start


def zero_scaled():
    """Intrinsic ``(m, n)``: sums for `add_scaled`, all 0."""
    return zero_sums if has_pair_sums() else zero_products


@intrinsic(prefer_literal=True)
def add_scaled(context, m, sums, ints, address, apart):
    """Add a group's sums times the 16 int8 scales at an address, for each of m row tiles (`simd.row_tile`)."""
    count = literal(m)
    if count is None or not isinstance(sums, Tile | PairTile) or type(sums) is not type(ints):
        return None
    n = sums.n // count

    def lower(context, b, sig, args):
        out = args[1]
        for i in range(count):
            scales = b.load(pointer(b, row_tile(b, args[3], args[4], i)), typ=ir.VectorType(I8, 16), align=16)
            scale = _in_words if has_pair_sums() else _in_floats
            for t in range(n):
                k = i * n + t
                both = (b.extract_value(v, k) for v in (out, args[2]))
                out = b.insert_value(out, scale(b, *both, scales, t, isinstance(sums, PairTile)), k)
        return out

    return sums(m, sums, ints, address, apart), lower


def _in_words(b, total, pairs, scales, t, paired):
    twice = ir.Constant(ir.VectorType(I32, 32), [lane // 2 for lane in range(32)])
    wide = b.sext(scales, ir.VectorType(I16, 16))
    wide, pairs = b.shuffle_vector(wide, wide, twice), b.bitcast(pairs, ir.VectorType(I16, 32))
    return b.add(total, join(b, *(wide_pairs(b, half(b, pairs, at, 16), half(b, wide, at, 16)) for at in (0, 16))))


def _in_floats(b, total, ints, scales, t, paired):
    by = b.sitofp(b.sext(scales, VI), VF)
    return emit_fma(b, b.sitofp(ints, VF), in_pairs(b, by, t) if paired else by, total)
