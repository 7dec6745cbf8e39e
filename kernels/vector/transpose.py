"""Transposition of K lines into V-like rows, in pieces of 4 tokens x 4 dimensions."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from .simd import I8, I16, I32, define, half, join, pointer, row


def _lanes(b, v, w, lanes):
    return b.shuffle_vector(v, w, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


@define(types.none, types.int64, types.int64)
def turn_i8(b, source, target):
    """Take the same 4 tokens of four lines of 16 tokens x 4 dimensions, from (dimensions by token) to a line of V."""
    quarter = ir.VectorType(I8, 16)
    a, c, d, e = (b.load(pointer(b, source, 64 * i), typ=quarter, align=16) for i in range(4))
    whole = join(b, join(b, a, c), join(b, d, e))
    lanes = [i - i % 16 + i % 4 * 4 + i % 16 // 4 for i in range(64)]
    b.store(_lanes(b, whole, whole, lanes), pointer(b, target), align=64)


def _of_elements(element):
    line = ir.VectorType(element, 16)
    pairs = [[4 * g + i + of for g in range(4) for i in (first, first + 1) for of in (0, 16)] for first in (0, 2)]
    fours = [[4 * g + i + of for g in range(4) for of in (0, 16) for i in (first, first + 1)] for first in (0, 2)]

    def emit(b, source, target, stride):
        """Four lines of 16 tokens of a dimension: those dimensions of 16 rows of V, `stride` bytes apart."""
        size = line.count * element.width // 8
        lines = [b.load(pointer(b, source, size * i), typ=line, align=size // 2) for i in range(4)]
        low = [_lanes(b, lines[0], lines[1], lanes) for lanes in pairs]
        high = [_lanes(b, lines[2], lines[3], lanes) for lanes in pairs]
        for j in range(4):  # token j of each four
            out = _lanes(b, low[j // 2], high[j // 2], fours[j % 2])
            for g in range(4):
                b.store(half(b, out, 4 * g, 4), pointer(b, row(b, target, stride, 4 * g + j)), align=size // 8)

    emit.__name__ = f"turn_i{element.width}"
    return define(types.none, types.int64, types.int64, types.int64)(emit)


turn_i16, turn_i32 = _of_elements(I16), _of_elements(I32)
