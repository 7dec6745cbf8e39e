"""Integer products of weights in lines (16 rows x 4 columns) with int8 activations, on every instruction set.

Matrices take two lines' worth at a time, 8 columns, because the best instructions do: `smmla` multiplies 2 rows x 8
columns, plain NEON adds two products of codes before it widens. Accumulators are a block of m row tiles x n tokens,
row tile by row tile; they start with `start_*`, grow by `dot_*` and are scaled by `scale_add` onto those of
`zero_products`; `in_rows` gives one vector per row tile and token in the end. The integers are exact, so that no bit
depends on the path.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

from . import neon
from .pair_sums import YI, by_halves, is_vnni, pairs_signed, pairs_unsigned, wide_pairs
from .simd import (
    F32,
    I16,
    I32,
    VB,
    VF,
    VI,
    F32x16,
    I32x16,
    Tile,
    call,
    constant,
    half,
    join,
    literal,
    per_row,
    pointer,
    splat,
)
from .targets import emit_fma, has


class PairTile(types.Type):
    """A tile whose tokens share vectors two by two, as `smmla` leaves them.

    Of tokens t and t + 1 (t even), vector t holds rows 0 .. 7 and vector t + 1 rows 8 .. 15: (row 0, token t),
    (row 0, token t + 1), (row 1, token t), ...
    """

    def __init__(self, vec, n):
        self.vec, self.n = vec, n
        super().__init__(name=f"PairTile({vec.name}, {n})")

    @property
    def llvm(self) -> ir.ArrayType:
        """The vectors as an LLVM array."""
        return ir.ArrayType(self.vec.llvm, self.n)


@register_model(PairTile)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.llvm)


def _plain_tile(vec, m, n):
    return Tile(vec, m * n)


def products_tile(vec, m, n):
    """Accumulators of m row tiles and n tokens: in pairs where smmla serves them."""
    return PairTile(vec, m * n) if has("i8mm") and n % 2 == 0 else Tile(vec, m * n)


# -- four products a lane ----------------------------------------------------------------------------------------------

def dot_u8_line(b, acc, w, x):
    """Unsigned bytes (0..15) times signed activations, exact: acc + the sum of each lane's four products."""
    if is_vnni():
        return vpdpbusd(b, acc, w, x)
    if has("avx2"):
        return b.add(acc, by_halves(b, _maddubs, w, x))
    return _dot_plain(b, acc, w, x)  # 0..15 reads the same signed


def dot_s8_line(b, acc, w, x):
    """Signed bytes in [-127, 127] times signed activations, exact; the start undoes the offset of VNNI."""
    if is_vnni():  # the instruction takes unsigned weights: flipping the sign bit adds 128
        return vpdpbusd(b, acc, b.xor(w, constant(VB, -128)), x)
    if has("avx2"):  # |w| * sign(w) x never saturates the 16-bit sums of two: 2 * 127 * 127 < 2^15
        return b.add(acc, by_halves(b, _maddubs_signed, w, x))
    return _dot_plain(b, acc, w, x)


def vpdpbusd(b, acc, w, x):
    """One register of a line, or two: AVX-VNNI has none wider than 32 bytes.

    Operands as 32-bit lanes: the form of LLVM before 22, which later ones still read.
    """
    w, x = b.bitcast(w, VI), b.bitcast(x, VI)
    if has("avx512vnni"):
        return call(b, "llvm.x86.avx512.vpdpbusd.512", VI, acc, w, x)
    parts = [[half(b, v, i, 8) for v in (acc, w, x)] for i in (0, 8)]
    return join(b, *(call(b, "llvm.x86.avx512.vpdpbusd.256", YI, *part) for part in parts))


def _maddubs(b, w, x):
    return wide_pairs(b, pairs_unsigned(b, w, x))


def _maddubs_signed(b, w, x):
    return wide_pairs(b, pairs_signed(b, w, x))


def _dot_plain(b, acc, w, x):
    """The specification: four shifted bytes of each 32-bit lane, multiplied as integers."""
    w, x = b.bitcast(w, VI), b.bitcast(x, VI)
    for j in range(4):
        up, down = constant(VI, 24 - 8 * j), constant(VI, 24)
        acc = b.add(acc, b.mul(b.ashr(b.shl(w, up), down), b.ashr(b.shl(x, up), down)))
    return acc


# -- blocks ------------------------------------------------------------------------------------------------------------


def dot_block(b, block, acc, lines, x, dot, smull):
    """Add products to a block of m row tiles x n tokens.

    `lines` holds per row tile one or two lines; the 4 activations of token t are at x + 4 t for the first, at x + 4 n +
    4 t for the second. Each load of activations serves m products, each line n. `dot` takes a line, `smull` is NEON's
    way without sdot.
    """
    m, each = len(lines), len(lines[0])
    n = block.n // m
    sums = [b.extract_value(acc, k) for k in range(block.n)]
    if has("neon"):
        for i in range(m):
            mine = slice(i * n, i * n + n)
            if isinstance(block, PairTile):
                sums[mine] = neon.dot_blocks(b, sums[mine], lines[i], x)
            else:
                sums[mine] = neon.dot_rows(b, neon.by_sdot if has("dotprod") else smull, sums[mine], lines[i], x)
    else:
        for j in range(each):
            for t in range(n):
                four = splat(b, b.load(pointer(b, x, 4 * (j * n + t)), typ=I32, align=4), VI)
                for i in range(m):
                    sums[i * n + t] = dot(b, sums[i * n + t], lines[i][j], b.bitcast(four, VB))
    for k, v in enumerate(sums):
        acc = b.insert_value(acc, v, k)
    return acc


def line_list(b, lines, value):
    """One line, or those of a tile."""
    return [b.extract_value(value, i) for i in range(lines.n)] if isinstance(lines, Tile) else [value]


def _dot_tile(dot, smull):
    """Intrinsic ``(block, lines, x)``: products of m lines (one, or a tile) with 4 activations each of n tokens."""

    @intrinsic
    def dot_tile(context, block, lines, x):
        if not isinstance(block, Tile):
            return None

        def lower(context, b, sig, args):
            return dot_block(b, block, args[0], [(w,) for w in line_list(b, lines, args[1])], args[2], dot, smull)

        return block(block, lines, x), lower

    return dot_tile


dot_u8 = _dot_tile(dot_u8_line, neon.by_smlal)


def nibbles(b, line):
    """Low and high nibbles; x86 has no shift of bytes, so there words are shifted."""
    fifteen = constant(VB, 15)
    if has("neon"):
        return b.and_(line, fifteen), b.lshr(line, constant(VB, 4))
    words = ir.VectorType(I16, 32)
    high = b.bitcast(b.lshr(b.bitcast(line, words), constant(words, 4)), VB)
    return b.and_(line, fifteen), b.and_(high, fifteen)


@intrinsic
def dot_int8(context, block, lines, following, x):
    """Add the products of lines with 4 activations of each token, and of the lines that follow with the next 4."""
    if not isinstance(block, Tile | PairTile):
        return None

    def lower(context, b, sig, args):
        both = list(zip(*(line_list(b, lines, value) for value in args[1:3]), strict=True))
        return dot_block(b, block, args[0], both, args[3], dot_s8_line, neon.by_smull)

    return block(block, lines, following, x), lower


# -- starts, scales, ends ----------------------------------------------------------------------------------------------


def _start(make_tile, shift_of):
    """Intrinsic ``(m, n, offsets)``: start of m x n accumulators.

    The int32 at offsets + 4 t is -8 x the sum of token t's activations of the group, and `shift_of()` says by which
    power of two more the weights are offset (None: not at all).
    """

    @intrinsic(prefer_literal=True)
    def start(context, m, n, offsets):
        row_tiles, tokens = literal(m), literal(n)
        if row_tiles is None or tokens is None:
            return None
        tile, shift = make_tile(I32x16, row_tiles, tokens), shift_of()

        def lower(context, b, sig, args):
            out = ir.Constant(tile.llvm, None)
            for k in range(tile.n if shift is not None else 0):
                offset = _of_tokens(b, tile, args[2], k % tokens, I32)
                if shift:  # codes of 3 bits are 4 above their levels: exact, for the sum has been multiplied by 8
                    offset = (b.shl if shift > 0 else b.ashr)(offset, constant(VI, abs(shift)))
                out = b.insert_value(out, offset, k)
            return out

        return tile(m, n, offsets), lower

    return start


def _s8_shift():
    return 4 if is_vnni() else None


start_s8 = _start(_plain_tile, _s8_shift)
start_u4 = _start(_plain_tile, lambda: 0)
start_int8 = _start(products_tile, _s8_shift)


def start_codes(shift):
    """As `start_int8`, of codes that are 8 << shift above their levels; None: not at all."""
    return _start(products_tile, lambda: shift)


def _of_tokens(b, tile, address, t, element):
    """The value (of 4 bytes) of token t in all lanes; in a PairTile those of its two tokens by turns."""
    if isinstance(tile, Tile):
        return splat(b, b.load(pointer(b, address, 4 * t), typ=element, align=4), ir.VectorType(element, 16))
    pair = b.load(pointer(b, address, 4 * (t - t % 2)), typ=ir.VectorType(element, 2), align=4)
    return neon.pick(b, pair, pair, [0, 1] * 8)


def in_pairs(b, rows, t):
    """A vector's 16 rows as vector t of a PairTile has them."""
    return neon.pick(b, rows, rows, [8 * (t % 2) + lane // 2 for lane in range(16)])


def _zero(vec):
    """Intrinsic ``(m, n)``: accumulators of m row tiles and n tokens, all 0; both are constants."""

    @intrinsic(prefer_literal=True)
    def zero(context, m, n):
        row_tiles, tokens = literal(m), literal(n)
        if row_tiles is None or tokens is None:
            return None
        tile = products_tile(vec, row_tiles, tokens)
        return tile(m, n), lambda context, b, sig, args: ir.Constant(tile.llvm, None)

    return zero


zero_products, zero_sums = _zero(F32x16), _zero(I32x16)


@intrinsic
def scale_add(context, acc, ints, w_scales, x_scales):
    """acc + ints * (w_scale of the row tile * x_scale of the token): a group's contribution, rounded alike everywhere.

    `ints` may be floats already. `w_scales` is one vector or a tile of m; the f32 scale of token t is at x_scales + 4
    t.
    """
    if not isinstance(acc, Tile | PairTile) or type(acc) is not type(ints):
        return None
    m = w_scales.n if isinstance(w_scales, Tile) else 1
    n = acc.n // m

    def lower(context, b, sig, args):
        out, scales = args[0], line_list(b, w_scales, args[2])
        for t in range(n):
            x = _of_tokens(b, acc, args[3], t, F32)
            for i, w in enumerate(scales):
                k = i * n + t
                if isinstance(acc, PairTile):
                    w = in_pairs(b, w, t)
                whole = b.extract_value(args[1], k)
                if ints.vec != F32x16:
                    whole = b.sitofp(whole, VF)
                out = b.insert_value(out, emit_fma(b, whole, b.fmul(w, x), b.extract_value(out, k)), k)
        return out

    return acc(acc, ints, w_scales, x_scales), lower


@intrinsic
def in_rows(context, acc):
    """Accumulators as a tile: one vector of 16 rows per row tile and token."""
    if isinstance(acc, Tile):
        return acc(acc), lambda context, b, sig, args: args[0]
    if not isinstance(acc, PairTile):
        return None
    tile = Tile(acc.vec, acc.n)

    def lower(context, b, sig, args):
        def step(b, v, k):
            both = (b.extract_value(args[0], k - k % 2 + i) for i in range(2))
            return neon.pick(b, *both, range(k % 2, 32, 2))

        return per_row(b, tile, args[0], step)

    return tile(acc), lower
