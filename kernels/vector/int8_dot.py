"""Integer products of weights in lines (16 rows x 4 columns) with int8 activations, on every instruction set.

Matrices take two lines' worth at a time, 8 columns, because the best instructions do: `smmla` multiplies 2 rows x 8
columns, plain NEON adds two products of codes before it widens. Accumulators (accumulators.py) are a block of m row
tiles x n tokens, row tile by row tile. The integers are exact, so that no bit depends on the path.
"""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from . import neon
from .accumulators import PairTile, line_list
from .pair_sums import YI, by_halves, is_vnni, pairs_signed, pairs_unsigned, wide_pairs
from .simd import I16, I32, VB, VI, Tile, call, constant, half, join, pointer, splat
from .targets import has

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
