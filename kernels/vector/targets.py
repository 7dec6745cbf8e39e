"""The operations that differ between instruction sets; an ISA level is no more than branches in kernels/vector.

`use(isa)` is called once, before any kernel compiles. A branch tests for a feature, never for the name of a level, so
a new ISA level needs its features in `isa.py` and one more branch where it has a better instruction.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..isa import ISA_LEVELS, Isa
from .memory import emit_scatter
from .simd import (
    F32,
    I16,
    I32,
    I64,
    VF,
    VI,
    F32x16,
    Tile,
    call,
    constant,
    define,
    literal,
    per_row,
    pointer,
    row,
    row_tile,
    splat,
)

_features: frozenset[str] = frozenset()
_isa = ISA_LEVELS[-1]


def use(isa: Isa) -> None:
    """Emit code for this ISA level from now on."""
    global _isa, _features
    _features = frozenset(f[1:] for f in isa.features.split(",") if f.startswith("+"))
    _isa = isa


def has(feature: str) -> bool:
    """Whether the ISA level being built has an LLVM feature (``aarch64`` stands for the machine)."""
    return feature in _features or feature == _isa.machine


# -- floats ------------------------------------------------------------------------------------------------------------


def emit_fma(b, x, y, z):
    """x * y + z: fused if there is an instruction, so that every kernel of an ISA level rounds alike."""
    if has("fma") or has("aarch64"):
        return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)
    return b.fadd(b.fmul(x, y), z)


@define(F32x16, F32x16, F32x16, F32x16)
def fma(b, x, y, z):
    """x * y + z, lane by lane."""
    return emit_fma(b, x, y, z)


def emit_widen_f16(b, bits):
    """<n x i16> of fp16 bits to <n x f32>."""
    n = bits.type.count
    floats, words = ir.VectorType(F32, n), ir.VectorType(I32, n)
    if has("f16c") or has("aarch64"):
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), n)), floats)
    wide = b.zext(bits, words)
    magnitude = b.shl(b.and_(wide, constant(words, 0x7FFF)), constant(words, 13))
    # moves the exponent's bias; right for subnormals
    scaled = b.fmul(b.bitcast(magnitude, floats), constant(floats, 2.0**112))
    sign = b.shl(b.and_(wide, constant(words, 0x8000)), constant(words, 16))
    return b.bitcast(b.or_(b.bitcast(scaled, words), sign), floats)


@define(F32x16, types.int64)
def load_f16x16(b, address):
    """16 fp16 values as f32."""
    return emit_widen_f16(b, b.load(pointer(b, address), typ=ir.VectorType(I16, 16), align=2))


def emit_narrow_f16(b, v):
    """<16 x f32> to <16 x i16> of fp16 bits, nearest, ties to even."""
    if has("f16c") or has("aarch64"):
        return b.bitcast(b.fptrunc(v, ir.VectorType(ir.HalfType(), 16)), ir.VectorType(I16, 16))
    bits = b.bitcast(v, VI)
    magnitude = b.and_(bits, constant(VI, 0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, constant(VI, 13)), constant(VI, 1))
    normal = b.lshr(b.add(b.add(magnitude, constant(VI, 0xC8000FFF - 2**32)), odd), constant(VI, 13))
    shifted = b.bitcast(b.fadd(b.bitcast(magnitude, VF), constant(VF, 0.5)), VI)
    tiny = b.sub(shifted, constant(VI, 0x3F000000))
    small = b.icmp_unsigned("<", magnitude, constant(VI, 0x38800000))
    large = b.icmp_unsigned(">=", magnitude, constant(VI, 0x47800000))
    out = b.select(large, constant(VI, 0x7C00), b.select(small, tiny, normal))
    sign = b.and_(b.lshr(bits, constant(VI, 16)), constant(VI, 0x8000))
    return b.trunc(b.or_(out, sign), ir.VectorType(I16, 16))


@define(types.none, types.int64, F32x16)
def store_f16x16(b, address, v):
    """16 floats as fp16."""
    b.store(emit_narrow_f16(b, v), pointer(b, address), align=2)


@define(types.none, types.int64, F32x16, types.int64)
def scatter_f16(b, address, v, stride):
    """16 floats as fp16, `stride` bytes apart."""
    emit_scatter(b, address, emit_narrow_f16(b, v), stride)


@define(types.int64, types.float32)
def f16_bits(b, x):
    """Bits of the nearest fp16."""
    return b.zext(b.extract_element(emit_narrow_f16(b, splat(b, x, VF)), ir.Constant(I32, 0)), I64)


@define(types.float32, types.int64)
def f32_from_f16_bits(b, bits):
    """The value of fp16 bits."""
    wide = emit_widen_f16(b, splat(b, b.trunc(bits, I16), ir.VectorType(I16, 16)))
    return b.extract_element(wide, ir.Constant(I32, 0))


# -- float steps on tiles ----------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def load_scales(context, m, address, apart):
    """The 16 fp16 scales of a group of each of m row tiles (`simd.row_tile`), as f32."""
    count = literal(m)
    if count is None:
        return None
    tile = Tile(F32x16, count)

    def lower(context, b, sig, args):
        def step(b, v, i):
            bits = b.load(pointer(b, row_tile(b, args[1], args[2], i)), typ=ir.VectorType(I16, 16), align=2)
            return emit_widen_f16(b, bits)

        return per_row(b, tile, ir.Constant(tile.llvm, ir.Undefined), step)

    return tile(m, address, apart), lower


@intrinsic
def fma_splat(context, acc, v, x, stride):
    """acc[t] + v * x[t], where x[t] is the f32 at x + t * stride."""
    if not isinstance(acc, Tile):
        return None

    def lower(context, b, sig, args):
        def step(b, a, t):
            scalar = b.load(pointer(b, row(b, args[2], args[3], t)), typ=F32, align=4)
            return emit_fma(b, args[1], splat(b, scalar, VF), a)

        return per_row(b, acc, args[0], step)

    return acc(acc, v, x, stride), lower


@intrinsic(prefer_literal=True)
def fma_column(context, acc, m, address, apart, x):
    """acc[i, t] + the 16 f16 at address of row tile i of m (`simd.row_tile`) * the f32 at x + 4 t."""
    count = literal(m)
    if count is None or not isinstance(acc, Tile):
        return None

    def lower(context, b, sig, args):
        tokens, halves = acc.n // count, ir.VectorType(I16, 16)
        column = [emit_widen_f16(b, b.load(pointer(b, row_tile(b, args[2], args[3], i)), typ=halves, align=2))
                  for i in range(count)]
        values = [splat(b, b.load(pointer(b, args[4], 4 * t), typ=F32, align=4), VF) for t in range(tokens)]
        return per_row(b, acc, args[0], lambda b, v, k: emit_fma(b, column[k // tokens], values[k % tokens], v))

    return acc(acc, m, address, apart, x), lower


def _outer_fma(name, llvm, align, widen):
    """Intrinsic ``(acc, n, address, p, stride)``: acc[i, t] + vector i at address (16 stored elements) * the f32 of t.

    acc holds m vectors x n rows, vector by vector; the f32 of row t is at p + t * stride.
    """

    @intrinsic(prefer_literal=True)
    def fma_rows(context, acc, n, address, p, stride):
        rows = literal(n)
        if rows is None or not isinstance(acc, Tile):
            return None

        def lower(context, b, sig, args):
            vectors = [widen(b, b.load(pointer(b, args[2], 16 * align * i), typ=llvm, align=align))
                       for i in range(acc.n // rows)]
            scalars = [splat(b, b.load(pointer(b, row(b, args[3], args[4], t)), typ=F32, align=4), VF)
                       for t in range(rows)]

            def step(b, v, k):
                return emit_fma(b, vectors[k // rows], scalars[k % rows], v)

            return per_row(b, acc, args[0], step)

        return acc(acc, n, address, p, stride), lower

    fma_rows.__name__ = name
    return fma_rows


fma_rows_f16 = _outer_fma("fma_rows_f16", ir.VectorType(I16, 16), 2, emit_widen_f16)
fma_rows_f32 = _outer_fma("fma_rows_f32", VF, 4, lambda b, v: v)


# -- threads -----------------------------------------------------------------------------------------------------------


@define(types.none)
def pause(b):
    """Tell the core that this is a spin loop."""
    if has("aarch64"):
        call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))
    else:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


@define(types.int64, types.int64, types.int64)
def atomic_add(b, address, value):
    """Add, and return the value from before (sequentially consistent)."""
    return b.atomic_rmw("add", pointer(b, address), value, "seq_cst")


@define(types.int64, types.int64)
def atomic_load(b, address):
    """Sequentially consistent load."""
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@define(types.none, types.int64, types.int64)
def atomic_store(b, address, value):
    """Sequentially consistent store."""
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


def _caller(n):
    @define(types.int64, *[types.int64] * (n + 1))
    def call_address(b, address, *arguments):
        """Call a C function of int64s at an address."""
        kind = ir.FunctionType(I64, [I64] * n)
        return b.call(b.inttoptr(address, kind.as_pointer()), arguments)

    return call_address


call2, call4, call6 = _caller(2), _caller(4), _caller(6)


def row_blocks() -> tuple[int, int]:
    """Row tiles of the register blocks of matmuls, and of those of one or two tokens; see Isa."""
    return _isa.row_tiles, _isa.streams


def token_tiles() -> tuple[int, ...]:
    """Tokens of register blocks of more than one; see Isa."""
    return _isa.token_tiles


def f32_chains() -> int:
    """Return the vectors of the register loop f32_peak; see Isa."""
    return _isa.f32_chains


def attention_tiles() -> tuple[tuple[int, tuple[int, ...], int], ...]:
    """Register tiles of attention, largest first: rows, vectors of V at once, chains of the products with K.

    32 registers of 16 lanes hold 16 sums with their operands, fewer hold 4 (measured with AVX2: 8 rows spill and
    take 1.25 times as long). The last width is 1, the last tile has 1 row.
    """
    if has("avx512f"):
        return (8, (2, 1), 1), (4, (4, 1), 2), (1, (8, 4, 1), 4)
    return (4, (1,), 1), (2, (2, 1), 2), (1, (4, 1), 4)


def state_vectors() -> int:
    """Vectors of a recurrent state's row that are in work at once: more would not leave registers for their sums."""
    return 2 if has("avx512f") else 1
