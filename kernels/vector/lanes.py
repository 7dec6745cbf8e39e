"""Lanes of a vector: filling, masking, comparing and rounding them, and folding them to one value."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from .simd import F32, I8, I16, I32, I64, VF, VI, F32x16, I32x16, call, constant, define, half, pointer, splat


@define(F32x16, None)
def splat_f32(b, x):
    """All 16 lanes = x (float32, or a float constant)."""
    return splat(b, x if x.type == F32 else b.fptrunc(x, F32), VF)


@define(I32x16, types.int64)
def splat_i32(b, x):
    """All 16 lanes = the low 32 bits of x."""
    return splat(b, b.trunc(x, I32), VI)


@define(I32x16)
def lane_numbers(b):
    """0, 1, ... 15."""
    return ir.Constant(VI, list(range(16)))


@define(types.float32, F32x16)
def first_lane(b, v):
    """Lane 0."""
    return b.extract_element(v, ir.Constant(I32, 0))


@define(F32x16, F32x16, types.int64)
def keep_first(b, v, n):
    """Lanes 0 .. n-1 as they are, the others 0."""
    keep = b.icmp_signed("<", ir.Constant(VI, list(range(16))), splat(b, b.trunc(n, I32), VI))
    return b.select(keep, v, constant(VF, 0.0))


@define(F32x16, F32x16, I32x16, types.int64, types.int64, types.float32)
def mask_outside(b, v, numbers, low, high, fill):
    """Return the lanes whose number is in [low, high] unchanged, the others as `fill`."""
    over = b.icmp_signed(">=", numbers, splat(b, b.trunc(low, I32), VI))
    under = b.icmp_signed("<=", numbers, splat(b, b.trunc(high, I32), VI))
    return b.select(b.and_(over, under), v, splat(b, fill, VF))


@define(F32x16, F32x16, types.int64, types.float32)
def mask_flagged(b, v, flags, fill):
    """Return the lanes whose byte at `flags` is 0 unchanged, the others as `fill`."""
    kind = ir.VectorType(I8, 16)
    there = b.icmp_signed("==", b.load(pointer(b, flags), typ=kind, align=1), constant(kind, 0))
    return b.select(there, v, splat(b, fill, VF))


@define(F32x16, F32x16, types.int64)
def allow(b, v, bits):
    """Return the lanes whose bit is set unchanged, the others as -inf but for NaN and +inf, which no mask hides."""
    word = b.and_(splat(b, b.trunc(bits, I32), VI), ir.Constant(VI, [1 << i for i in range(16)]))
    broken = b.fcmp_unordered(">", v, constant(VF, 3.4028234663852886e38))
    kept = b.or_(b.icmp_signed("!=", word, constant(VI, 0)), broken)
    return b.select(kept, v, constant(VF, float("-inf")))


@define(F32x16, F32x16, F32x16)
def vmax(b, x, y):
    """Larger lane by lane (no NaN expected)."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@define(F32x16, F32x16, F32x16)
def vmax_or_inf(b, x, y):
    """Larger lane by lane, as `vmax`; +inf where y is NaN."""
    y = b.select(b.fcmp_unordered("uno", y, y), constant(VF, float("inf")), y)
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@define(types.int64, F32x16, types.float32)
def lanes_at_least(b, v, x):
    """Bit i for each lane i that is x or more."""
    mask = b.fcmp_ordered(">=", v, splat(b, x, VF))
    return b.zext(b.bitcast(mask, I16), I64)


@define(types.int64, F32x16, F32x16)
def lanes_above(b, v, w):
    """Bit i for each lane i of v that is more than that of w."""
    return b.zext(b.bitcast(b.fcmp_ordered(">", v, w), I16), I64)


@define(I32x16, types.int64, types.int64)
def differing_bits(b, left, right):
    """Number of bits, in each lane, that differ between the words at two unaligned addresses."""
    words = [b.load(pointer(b, at), typ=VI, align=4) for at in (left, right)]
    return call(b, "llvm.ctpop.v16i32", VI, b.xor(*words))


@define(F32x16, F32x16)
def vabs(b, v):
    """Absolute value."""
    return b.bitcast(b.and_(b.bitcast(v, VI), constant(VI, 0x7FFFFFFF)), VF)


def _tree(b, v, combine):
    """Fold 16 lanes in a fixed order: 8 + 8, 4 + 4, 2 + 2, 1 + 1, the same on every instruction set."""
    n = 16
    while n > 1:
        n //= 2
        v = combine(half(b, v, 0, n), half(b, v, n, n))
    return b.extract_element(v, ir.Constant(I32, 0))


@define(types.float32, F32x16)
def sum_lanes(b, v):
    """Sum of the lanes, in a fixed order."""
    return _tree(b, v, b.fadd)


@define(types.float32, F32x16)
def max_lanes(b, v):
    """Largest lane."""
    return _tree(b, v, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@define(types.int64, I32x16)
def sum_lanes_i32(b, v):
    """Sum of integer lanes."""
    return b.sext(_tree(b, v, b.add), I64)


@define(I32x16, F32x16)
def round_to_i32(b, v):
    """Nearest integer, ties to even, for |v| < 2^22: the sum with 1.5 * 2^23 leaves it in the low bits."""
    magic = 12582912.0
    return b.sub(b.bitcast(b.fadd(v, constant(VF, magic)), VI), constant(VI, 0x4B400000))


@define(F32x16, I32x16)
def to_f32(b, v):
    """The integers as floats."""
    return b.sitofp(v, VF)


@define(F32x16, F32x16)
def round_to_bf16(b, v):
    """Nearest bfloat16, ties to even, as a float (no NaN expected)."""
    bits = b.bitcast(v, VI)
    odd = b.and_(b.lshr(bits, constant(VI, 16)), constant(VI, 1))
    bits = b.add(bits, b.add(odd, constant(VI, 0x7FFF)))
    return b.bitcast(b.and_(bits, constant(VI, -0x10000)), VF)


@define(I32x16, I32x16)
def clamp_i8(b, v):
    """Lanes cut to [-127, 127]."""
    low, high = constant(VI, -127), constant(VI, 127)
    v = b.select(b.icmp_signed(">", v, low), v, low)
    return b.select(b.icmp_signed("<", v, high), v, high)
