"""Steps on 64-byte lines of the layout neuron: one row of weights at a time, as it is.

A line of q2 has 256 columns, of q4 128, of int8 64; 16 bytes of it (a quarter) belong to one group. Two uses:

* rows (gate, up) meet activations that were laid out as lines before (`as_lines` in `ops/neuron_ffn/neuron_parts.py`):
  for each line the activations of its codes (q4: 64 of the low nibbles, 64 of the high ones), 16 int32 that the sums
  start at, 16 float scales. A sum has 16 lanes of 4 (8, 16) columns each, all exact integers, scaled lane by lane.
* columns (down) are added to floats: acc + code * (scale * activation), output by output.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from . import neon
from .int8_dot import dot_s8_line, dot_u8_line, is_vnni, nibbles
from .simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VB,
    VF,
    VI,
    F32x16,
    Tile,
    call,
    constant,
    define,
    half,
    join,
    literal,
    pointer,
    row,
    splat,
)
from .targets import emit_fma, emit_widen_f16, has

_FOUR = ir.VectorType(F32, 4)
_QUARTER = ir.VectorType(I8, 16)


def _scales(each):
    """Intrinsic ``(address)``: fp16 scales of the next 16 quarters as floats, `each` quarters to a scale."""

    def emit(b, address):
        stored = b.load(pointer(b, address), typ=ir.VectorType(I16, 16 // each), align=2)
        lanes = ir.Constant(ir.VectorType(I32, 16), [lane // each for lane in range(16)])
        return emit_widen_f16(b, b.shuffle_vector(stored, ir.Constant(stored.type, ir.Undefined), lanes))

    emit.__name__ = f"scales_of_{each}"
    return define(F32x16, types.int64)(emit)


scales_1, scales_2, scales_4, scales_8 = (_scales(each) for each in (1, 2, 4, 8))


# -- rows --------------------------------------------------------------------------------------------------------------


def _in_quarters(b, acc, operands, product):
    """NEON: quarter by quarter."""
    parts = []
    for i in range(4):
        fours = [(half(b, w, 16 * i, 16), half(b, x, 16 * i, 16)) for w, x in operands]
        parts.append(product(b, half(b, acc, 4 * i, 4), fours))
    return join(b, join(b, *parts[:2]), join(b, *parts[2:]))


def _sum_products(b, acc, operands, dot, small):
    """acc + the products of lines of weights with lines of activations, four neighbours to a lane."""
    if has("neon"):
        return _in_quarters(b, acc, operands, neon.by_sdot if has("dotprod") else small)
    for w, x in operands:
        acc = dot(b, acc, w, x)
    return acc


def _line(b, address, offset=0):
    return b.load(pointer(b, address, offset), typ=VB, align=64)


def _row_step(codes, dot, small):
    """Intrinsic ``(acc, count, w, scales, x)``: acc[t] + `count` lines from w on times token t's lines at x, scaled.

    `scales` are those of the next 16 quarters, those of the lines first; `count` is a constant, at most 4.
    `codes(builder, line)` gives the vectors of codes, as many as an activation line has vectors of values.
    """

    @intrinsic(prefer_literal=True)
    def step(context, acc, count, w, scales, x):
        n_lines = literal(count)
        if not isinstance(acc, Tile) or n_lines is None:
            return None

        def lower(context, b, sig, args):
            sums = [b.extract_value(args[0], t) for t in range(acc.n)]
            for i in range(n_lines):
                lines = codes(b, _line(b, args[2], 64 * i))
                spread = ir.Constant(ir.VectorType(I32, 16), [4 * i + lane // 4 for lane in range(16)])
                wide = b.shuffle_vector(args[3], ir.Constant(VF, ir.Undefined), spread)
                values = 64 * len(lines)
                for t in range(acc.n):
                    at = (i * acc.n + t) * (values + 128)
                    operands = [(line, _line(b, args[4], at + 64 * k)) for k, line in enumerate(lines)]
                    start = b.load(pointer(b, args[4], at + values), typ=VI, align=64)
                    ints = _sum_products(b, start, operands, dot, small)
                    factor = b.fmul(wide, b.load(pointer(b, args[4], at + values + 64), typ=VF, align=64))
                    sums[t] = emit_fma(b, b.sitofp(ints, VF), factor, sums[t])
            out = args[0]
            for t, total in enumerate(sums):
                out = b.insert_value(out, total, t)
            return out

        return acc(acc, count, w, scales, x), lower

    return step


def _pieces_q2(b, line):
    """The four codes of 2 bits of each byte, as vectors of bytes."""
    three = constant(VB, 3)
    if has("neon"):
        return [b.and_(b.lshr(line, constant(VB, shift)), three) for shift in (0, 2, 4, 6)]
    words = ir.VectorType(I16, 32)  # x86 has no shift of bytes
    whole = b.bitcast(line, words)
    return [b.and_(b.bitcast(b.lshr(whole, constant(words, shift)), VB), three) for shift in (0, 2, 4, 6)]


row_q2 = _row_step(_pieces_q2, dot_u8_line, neon.by_smlal)
row_q4 = _row_step(nibbles, dot_u8_line, neon.by_smlal)
row_int8 = _row_step(lambda b, line: [line], dot_s8_line, neon.by_smull)


def _start_unsigned(vectors, offset):
    """Intrinsic ``(x)``: store after the vectors at x where sums start: codes are `offset` too large."""

    @define(types.none, types.int64)
    def start(b, x):
        operands = [(constant(VB, offset), _line(b, x, 64 * k)) for k in range(vectors)]
        total = _sum_products(b, constant(VI, 0), operands, dot_u8_line, neon.by_smlal)
        b.store(b.neg(total), pointer(b, x, 64 * vectors), align=64)

    return start


start_q2, start_q4 = _start_unsigned(4, 1), _start_unsigned(2, 8)


@define(types.none, types.int64)
def start_int8(b, x):
    """Store after the vector at x where sums start: VNNI takes unsigned weights, 128 too large."""
    start = constant(VI, 0)
    if is_vnni():
        start = b.neg(dot_u8_line(b, start, constant(VB, -128), _line(b, x)))
    b.store(start, pointer(b, x, 64), align=64)


@define(F32x16, F32x16)
def next_quarters(b, scales):
    """Scales of the line that follows first: those of 4 quarters on."""
    lanes = ir.Constant(ir.VectorType(I32, 16), [(lane + 4) % 16 for lane in range(16)])
    return b.shuffle_vector(scales, ir.Constant(VF, ir.Undefined), lanes)


# -- columns -----------------------------------------------------------------------------------------------------------


def _addresses(b, q, sides, first, piece, address, stride, tokens):
    """Pointers to a part's sums: per token, quarter and side (a byte's codes, lowest bits first) 16 outputs.

    A byte has a code of each side, and those of a group are `piece` outputs apart: the first code of byte p of a line
    is of output sides p - (sides - 1) (p % piece). Bytes of int8 (one side) are their output.
    """
    for t in range(tokens):
        base = row(b, address, stride, t)
        for i in range(q):
            at = b.add(first, ir.Constant(I64, 16 * i))
            if sides > 1:
                inner = b.and_(at, b.sub(piece, ir.Constant(I64, 1)))
                at = b.sub(b.mul(at, ir.Constant(I64, sides)), b.mul(inner, ir.Constant(I64, sides - 1)))
            for side in range(sides):
                there = b.add(at, b.mul(piece, ir.Constant(I64, side))) if side else at
                yield pointer(b, b.add(base, b.shl(there, ir.Constant(I64, 2))))


@intrinsic(prefer_literal=True)
def load_columns(context, tokens, q, sides, first, piece, address, stride):
    """Sums of q quarters from byte `first` of a line on, for some tokens, as a tile; see `_addresses`."""
    n, quarters, both = literal(tokens), literal(q), literal(sides)
    if n is None or quarters is None or both is None:
        return None
    tile = Tile(F32x16, n * quarters * both)

    def lower(context, b, sig, args):
        out = ir.Constant(tile.llvm, ir.Undefined)
        addresses = _addresses(b, quarters, both, args[3], args[4], args[5], args[6], n)
        for k, address in enumerate(addresses):
            out = b.insert_value(out, b.load(address, typ=VF, align=4), k)
        return out

    return tile(tokens, q, sides, first, piece, address, stride), lower


@intrinsic(prefer_literal=True)
def store_columns(context, tile, tokens, q, sides, first, piece, address, stride):
    """The inverse of `load_columns`."""
    n, quarters, both = literal(tokens), literal(q), literal(sides)
    if n is None or quarters is None or both is None or not isinstance(tile, Tile):
        return None

    def lower(context, b, sig, args):
        addresses = _addresses(b, quarters, both, args[4], args[5], args[6], args[7], n)
        for k, address in enumerate(addresses):
            b.store(b.extract_value(args[0], k), address, align=4)
        return context.get_dummy_value()

    return types.none(tile, tokens, q, sides, first, piece, address, stride), lower


def _codes_below_8_bits(bits, offset):
    """Return the function that makes floats of the codes of 16 bytes, `offset` less: a vector for each side."""

    def codes(b, address):
        wide = b.zext(b.load(pointer(b, address), typ=_QUARTER, align=16), VI)
        sides = [b.lshr(wide, constant(VI, shift)) if shift else wide for shift in range(0, 8, bits)]
        if has("avx512f"):  # a table of 16 floats by the low 4 bits of each lane
            table = ir.Constant(VF, [float(code % (1 << bits) - offset) for code in range(16)])
            return [call(b, "llvm.x86.avx512.permvar.sf.512", VF, table, side) for side in sides]
        sides[:-1] = [b.and_(side, constant(VI, (1 << bits) - 1)) for side in sides[:-1]]
        return [b.sitofp(b.sub(side, constant(VI, offset)), VF) for side in sides]

    return codes


def _codes_int8(b, address):
    """16 bytes as floats."""
    return [b.sitofp(b.sext(b.load(pointer(b, address), typ=_QUARTER, align=16), VI), VF)]


def _column_step(codes, sides):
    """Intrinsic ``(acc, tokens, part, w, factors, stride)``: acc + part `part` of the line at w, times its factors.

    The floats at `factors` belong to the line's quarters, those of the next token are `stride` bytes on; acc is a tile
    of `load_columns`.
    """

    @intrinsic(prefer_literal=True)
    def step(context, acc, tokens, part, w, factors, stride):
        n, number = literal(tokens), literal(part)
        if not isinstance(acc, Tile) or n is None or number is None:
            return None
        quarters = acc.n // (n * sides)

        def lower(context, b, sig, args):
            out, first = args[0], quarters * number
            floats = [codes(b, b.add(args[3], ir.Constant(I64, 16 * (first + i)))) for i in range(quarters)]
            for t in range(n):
                for i in range(quarters):
                    address = pointer(b, row(b, args[4], args[5], t), 4 * (first + i))
                    factor = splat(b, b.load(address, typ=F32, align=4), VF)
                    for side in range(sides):
                        k = (t * quarters + i) * sides + side
                        out = b.insert_value(out, emit_fma(b, floats[i][side], factor, b.extract_value(out, k)), k)
            return out

        return acc(acc, tokens, part, w, factors, stride), lower

    return step


column_q2 = _column_step(_codes_below_8_bits(2, 1), 4)
column_q4 = _column_step(_codes_below_8_bits(4, 8), 2)
column_int8 = _column_step(_codes_int8, 1)

def block_tokens() -> int:
    """Tokens of a block."""
    return 4 if has("avx512f") else 2


def column_parts(sides: int, tokens: int) -> int:
    """Parts in which a line of columns is added to the sums of some tokens: registers hold those of a part."""
    vectors = 16 if has("avx512f") else 4
    return max(1, min(4, 4 * max(sides, 2) * tokens // vectors))


@define(types.none, types.int64, types.float32)
def store_quarter(b, address, x):
    """Four equal floats."""
    b.store(splat(b, x, _FOUR), pointer(b, address), align=4)
