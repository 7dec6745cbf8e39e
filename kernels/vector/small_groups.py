"""Sums of groups of weights that are smaller than the activations' (quant.INPUT_COLUMNS), before the floats.

A group's sum is multiplied by its 8-bit scale while it is an exact integer, so that the groups of a part are scaled and
added as floats once, by the outer scale and the activations'. Where products come as sums of two in 16 bits, the
instruction that widens them multiplies by the scale. Elsewhere floats hold the integers: 2 groups x 16 columns x 32 x
127 x 128 is below 2^24.

Rows of activations have no sums for such small groups. The offset of codes above their levels is subtracted from the
codes (`packed`), or, where bytes of weights must be unsigned, from the start of the sums, by the activations in work. A
group's sum fits 16 bits; overflow on the way to it cancels out.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .accumulators import PairTile, in_pairs, products_tile, zero_products, zero_sums
from .int8_dot import vpdpbusd
from .packed_formats import FORMS
from .pair_sums import YB, YI, has_pair_sums, pairs_unsigned, wide_pairs
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
    """Return whether weights are multiplied as unsigned bytes: codes then keep their offset."""
    return has("avx2")


def _words():
    """Type of the result of `_add_offsets` as lanes of 32 bits."""
    return YI if has_pair_sums() else VI


def _add_offsets(b, offset, x, total=None):
    """Sums of four activations times the offset, a lane each, added to others: whole ones, or both of two in 16 bits.
    """
    if has_pair_sums():
        sums = pairs_unsigned(b, constant(YB, offset), b.bitcast(x, YB))
        return b.add(total, sums) if total else sums
    return vpdpbusd(b, total or constant(VI, 0), constant(VB, offset), x)


def _negated(b, total):
    return b.bitcast(b.sub(constant(total.type, 0), total), _words())


def _in_lanes(b, lanes, *vectors):
    """The lanes with these numbers of one vector, or of two one after the other; -1: 0."""
    other = vectors[1] if len(vectors) > 1 else ir.Constant(vectors[0].type, None)
    count = vectors[0].type.count
    numbers = ir.Constant(ir.VectorType(I32, len(lanes)), [count if lane < 0 else lane for lane in lanes])
    return b.shuffle_vector(vectors[0], other, numbers)


def _of_one_token(b, offset, x):
    """The start of a group's sums of one token, in all lanes: four activations follow each other four times."""
    four, count = ir.VectorType(I32, 4), _words().count
    x = _in_lanes(b, [*range(4), *[-1] * (count - 4)], b.load(pointer(b, x), typ=four, align=4))
    total = _add_offsets(b, offset, x)
    sums = _in_lanes(b, range(4), b.bitcast(total, _words()))
    kind = ir.VectorType(I16, 8) if has_pair_sums() else four
    for other in (1, 2):
        turned = _in_lanes(b, [lane ^ other for lane in range(4)], sums)
        sums = b.bitcast(b.add(b.bitcast(sums, kind), b.bitcast(turned, kind)), four)
    start = b.bitcast(b.sub(constant(kind, 0), b.bitcast(sums, kind)), four)
    return _in_lanes(b, [0] * 16, start)


@cache
def store_offsets(name: str, group: int):
    """Intrinsic ``(n, groups, x, address)``: store the start of the sums of groups with activations at x.

    It is -offset x the sum of each token's activations, n lanes of 32 bits for each group. Those of a whole record are
    stored at once: computed beside the products, they would delay those of every group.
    """
    offset, steps = FORMS[name].offset, group // 4

    @intrinsic(prefer_literal=True)
    def store(context, n, groups, x, address):
        tokens, count = literal(n), literal(groups)
        if tokens is None or count is None:
            return None
        kind, both = ir.VectorType(I32, tokens), 2 * tokens

        def lower(context, b, sig, args):
            lanes = [*range(both), *[-1] * (_words().count - both)] if both < _words().count else range(both)
            for first in range(0, count, 2):
                total = None
                for step in range(steps):
                    parts = [b.load(pointer(b, args[2], 4 * tokens * (steps * g + step)), typ=kind, align=4)
                             for g in (first, first + 1)]
                    four = _in_lanes(b, range(both), *parts)
                    total = _add_offsets(b, offset, _in_lanes(b, lanes, four), total)
                found = _in_lanes(b, range(both), _negated(b, total))
                b.store(found, pointer(b, args[3], 4 * tokens * first), align=4)
            return context.get_dummy_value()

        return types.none(n, groups, x, address), lower

    return store


@cache
def start_of_fine(name: str):
    """Intrinsic ``(m, n, x, offsets)``: start of the sums of a group with activations at x.

    For several tokens `store_offsets` has stored it. It is 0 where codes are signed.
    """
    form = FORMS[name]

    @intrinsic(prefer_literal=True)
    def start(context, m, n, x, offsets):
        row_tiles, tokens = literal(m), literal(n)
        if row_tiles is None or tokens is None:
            return None
        tile = products_tile(I32x16, row_tiles, tokens)

        def lower(context, b, sig, args):
            out = ir.Constant(tile.llvm, None)
            alone = _of_one_token(b, form.offset, args[2]) if unsigned_codes() and tokens == 1 else None
            for k in range(tile.n if unsigned_codes() else 0):
                lane = alone or splat(b, b.load(pointer(b, args[3], 4 * (k % tokens)), typ=I32, align=4), VI)
                out = b.insert_value(out, lane, k)
            return out

        return tile(m, n, x, offsets), lower

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
