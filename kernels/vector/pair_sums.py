"""Products of bytes as sums of two in 16 bits, where no instruction multiplies and adds four (AVX2 alone)."""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from .simd import I8, I16, I32, VB, VI, Tile, call, constant, half, join, per_row, pointer, splat
from .targets import has

YB, YW, YI = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)


def is_vnni():
    """Return whether there is vpdpbusd, which takes unsigned weights."""
    return has("avx512vnni") or has("avxvnni")


def has_pair_sums():
    """Return whether products come as sums of two in 16 bits, of which several are added before they are widened."""
    return has("avx2") and not is_vnni()


def by_halves(b, product, w, x):
    """Apply a 32-byte product to both halves of a line."""
    return join(b, *(product(b, half(b, w, start, 32), half(b, x, start, 32)) for start in (0, 32)))


def pairs_unsigned(b, w, x):
    """Unsigned bytes times signed ones, two products a lane; beyond 16 bits it stays at their largest number."""
    return call(b, "llvm.x86.avx2.pmadd.ub.sw", YW, w, x)


def pairs_signed(b, w, x):
    """Products as `pairs_unsigned`, of bytes in [-127, 127]."""
    size = call(b, "llvm.abs.v32i8", YB, w, ir.Constant(ir.IntType(1), 0))
    return pairs_unsigned(b, size, call(b, "llvm.x86.avx2.psign.b", YB, x, w))


def wide_pairs(b, pairs, by=None):
    """Sums of two of 16 bits, times numbers of 16 bits."""
    return call(b, "llvm.x86.avx2.pmadd.wd", YI, pairs, constant(YW, 1) if by is None else by)


def pair_block(b, block, acc, lines, x, signed):
    """Add products to a block of sums of two in 16 bits, as `dot_block` adds them to those of four in 32."""
    m, each = len(lines), len(lines[0])
    n, words = block.n // m, ir.VectorType(I16, 32)
    keep = _kept if block.n > 2 else lambda b, words: words  # few sums are added sooner in another order
    sums = [b.bitcast(b.extract_value(acc, k), words) for k in range(block.n)]
    for j in range(each):
        for t in range(n):
            four = _four(b, x, j * n + t)
            for i in range(m):
                sums[i * n + t] = keep(b, b.add(sums[i * n + t], _pairs(b, lines[i][j], four, signed)))
    for k, v in enumerate(sums):
        acc = b.insert_value(acc, b.bitcast(v, VI), k)
    return acc


def _kept(b, words):
    """Return the same value, opaque to the compiler, which would otherwise add products of several steps first, in more
    registers."""
    kind = ir.FunctionType(YW, [YW])
    return join(b, *(b.asm(kind, "", "=x,0", [half(b, words, at, 16)], side_effect=True) for at in (0, 16)))


def _four(b, x, t):
    return b.bitcast(splat(b, b.load(pointer(b, x, 4 * t), typ=I32, align=4), VI), VB)


def _pairs(b, w, x, signed):
    return by_halves(b, pairs_signed if signed else pairs_unsigned, w, x)


def _widened(b, words):
    return join(b, *(wide_pairs(b, half(b, words, start, 16)) for start in (0, 16)))


def widen_block(b, block, ints, pairs):
    """ints + the sums of 16 bits, two by two."""
    def step(b, v, k):
        return b.add(v, _widened(b, b.bitcast(b.extract_value(pairs, k), ir.VectorType(I16, 32))))

    return per_row(b, block, ints, step)


@intrinsic
def widen_pairs(context, ints, pairs):
    """Intrinsic of `widen_block`."""
    if not isinstance(ints, Tile) or type(ints) is not type(pairs):
        return None
    return ints(ints, pairs), lambda context, b, sig, args: widen_block(b, ints, *args)


@intrinsic
def add_sums(context, ints, others):
    """The sum of two blocks, lane by lane."""
    if not isinstance(ints, Tile) or type(ints) is not type(others):
        return None

    def lower(context, b, sig, args):
        return per_row(b, ints, args[0], lambda b, v, k: b.add(v, b.extract_value(args[1], k)))

    return ints(ints, others), lower
