"""Vectors as Numba types: kernels written in Python compile to the vector instructions that they spell out.

Imported only while kernels are built. A `Vec` is an LLVM vector in a register; a `Tile` is n of them (LLVM keeps
each in a register of its own). Addresses are int64: kernels have no arrays, so their objects have no symbols.
Operations that differ between instruction sets are in `targets.py`; everything here is target-neutral LLVM.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
_ELEMENTS = {"f32": F32, "i32": I32, "i8": I8}


class Vec(types.Type):
    """A vector register's worth of lanes."""

    def __init__(self, element: str, lanes: int):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")

    @property
    def llvm(self) -> ir.VectorType:
        """LLVM's type of the register."""
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)


class Tile(types.Type):
    """`n` vectors, one per token (or query row): the accumulators of a register tile."""

    def __init__(self, vec: Vec, n: int):
        self.vec, self.n = vec, n
        super().__init__(name=f"Tile({vec.name}, {n})")

    @property
    def llvm(self) -> ir.ArrayType:
        """LLVM's type of all n."""
        return ir.ArrayType(self.vec.llvm, self.n)


@register_model(Vec)
@register_model(Tile)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.llvm)


F32x16, I32x16, I8x64 = Vec("f32", 16), Vec("i32", 16), Vec("i8", 64)
VF, VI, VB = F32x16.llvm, I32x16.llvm, I8x64.llvm


# -- emitters: small steps that intrinsics share -----------------------------------------------------------------------


def pointer(b, address, offset=0):
    """int64 address (+ constant offset) -> pointer."""
    if offset:
        address = b.add(address, ir.Constant(I64, offset))
    return b.inttoptr(address, ir.PointerType())


def row(b, address, stride, index):
    """Address of row `index` (a Python int) at `stride` bytes (an int64 value)."""
    return address if index == 0 else b.add(address, b.mul(stride, ir.Constant(I64, index)))


def row_tile(b, address, apart, index):
    """Address of row tile `index` (a Python int): the two of a pair are apart[0] bytes apart, pairs apart[1] bytes.

    With 0 some are the same one: so a block takes fewer than it is made for.
    """
    return row(b, row(b, address, b.extract_value(apart, 0), index % 2), b.extract_value(apart, 1), index // 2)


def splat(b, scalar, vector):
    """Every lane = scalar."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def constant(vector, value):
    """A vector constant with equal lanes."""
    return ir.Constant(vector, [value] * vector.count)


def call(b, name, result, *arguments):
    """Call an LLVM intrinsic (or declared function) by name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def half(b, v, start, n):
    """Lanes start .. start + n."""
    lanes = ir.Constant(ir.VectorType(I32, n), list(range(start, start + n)))
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), lanes)


def join(b, low, high):
    """Two vectors one after the other."""
    n = 2 * low.type.count
    return b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, n), list(range(n))))


def define(result, *arguments):
    """Make an intrinsic ``result(*arguments)`` from an emitter ``emit(builder, *values)``."""

    def decorate(emit):
        def typed(context, *given):
            for want, have in zip(arguments, given, strict=True):
                if want is not None and isinstance(want, Vec | Tile) and want != have:
                    return None

            def lower(context, builder, sig, values):
                out = emit(builder, *values)
                return context.get_dummy_value() if out is None else out

            return result(*[want or have for want, have in zip(arguments, given, strict=True)]), lower

        return _arity(len(arguments), typed, emit)

    return decorate


def _arity(n, typed, emit):
    """`intrinsic` reads the parameter names, so give it a function of exactly n parameters."""
    names = [f"a{i}" for i in range(n)]
    scope = {"typed": typed}
    exec(f"def {emit.__name__}(context, {', '.join(names)}): return typed(context, {', '.join(names)})", scope)
    function = scope[emit.__name__]
    function.__doc__ = emit.__doc__
    return intrinsic(function)


# -- arithmetic operators on vectors -----------------------------------------------------------------------------------

_FLOAT = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}
_INTEGER = {operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.and_: "and_", operator.or_: "or_"}


def _operators() -> None:
    for op in {*_FLOAT, *_INTEGER}:

        @infer_global(op)
        class _Typing(AbstractTemplate):
            def generic(self, args, kws):
                if len(args) == 2 and isinstance(args[0], Vec) and args[0] == args[1]:
                    return signature(args[0], *args)
                return None

        def lower(context, builder, sig, args, op=op):
            table = _FLOAT if sig.return_type.element == "f32" else _INTEGER
            return getattr(builder, table[op])(*args)

        lower_builtin(op, Vec, Vec)(lower)


_operators()

# -- memory ------------------------------------------------------------------------------------------------------------


def _loader(name, llvm, result, align, widen=None):
    def emit(b, address):
        value = b.load(pointer(b, address), typ=llvm, align=align)
        return widen(b, value) if widen else value

    emit.__name__ = name
    return define(result, types.int64)(emit)


def _storer(name, llvm, argument, align, narrow=None):
    def emit(b, address, value):
        b.store(narrow(b, value) if narrow else value, pointer(b, address), align=align)

    emit.__name__ = name
    return define(types.none, types.int64, argument)(emit)


load_i64 = _loader("load_i64", I64, types.int64, 8)
load_i32 = _loader("load_i32", I32, types.int64, 4, lambda b, v: b.sext(v, I64))
load_u16 = _loader("load_u16", I16, types.int64, 2, lambda b, v: b.zext(v, I64))
load_i8 = _loader("load_i8", I8, types.int64, 1, lambda b, v: b.sext(v, I64))
load_f32 = _loader("load_f32", F32, types.float32, 4)
load_f64 = _loader("load_f64", F64, types.float64, 8)
load_f32x16 = _loader("load_f32x16", VF, F32x16, 4)
load_line = _loader("load_line", VB, I8x64, 64)
store_i64 = _storer("store_i64", I64, types.int64, 8)
store_i32 = _storer("store_i32", I32, types.int64, 4, lambda b, v: b.trunc(v, I32))
store_i16 = _storer("store_i16", I16, types.int64, 2, lambda b, v: b.trunc(v, I16))
store_i8 = _storer("store_i8", I8, types.int64, 1, lambda b, v: b.trunc(v, I8))
store_f64 = _storer("store_f64", F64, types.float64, 8)
store_f32 = _storer("store_f32", F32, types.float32, 4)
store_f32x16 = _storer("store_f32x16", VF, F32x16, 4)


@define(types.none, types.int64, F32x16, types.int64)
def store_first(b, address, v, n):
    """Store lanes 0 .. n-1 and touch nothing else."""
    keep = b.icmp_signed("<", ir.Constant(VI, list(range(16))), splat(b, b.trunc(n, I32), VI))
    call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), v, pointer(b, address), ir.Constant(I32, 4), keep)


@define(types.int64, types.int64)
def opaque(b, value):
    """The same value, which the compiler does not know: a loop so many times stays a loop."""
    kind = ir.FunctionType(I64, [I64])
    return b.asm(kind, "", "=r,0", [value], side_effect=False)


@define(types.none, types.int64)
def prefetch(b, address):
    """Ask for the cache line at `address` (reading, all levels)."""
    one, three = ir.Constant(I32, 1), ir.Constant(I32, 3)
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address), ir.Constant(I32, 0), three, one)


# -- lanes -------------------------------------------------------------------------------------------------------------


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
    """Lanes whose number is in [low, high] as they are, the others `fill`."""
    over = b.icmp_signed(">=", numbers, splat(b, b.trunc(low, I32), VI))
    under = b.icmp_signed("<=", numbers, splat(b, b.trunc(high, I32), VI))
    return b.select(b.and_(over, under), v, splat(b, fill, VF))


@define(F32x16, F32x16, types.int64, types.float32)
def mask_flagged(b, v, flags, fill):
    """Lanes whose byte at `flags` is 0 as they are, the others `fill`."""
    kind = ir.VectorType(I8, 16)
    there = b.icmp_signed("==", b.load(pointer(b, flags), typ=kind, align=1), constant(kind, 0))
    return b.select(there, v, splat(b, fill, VF))


@define(F32x16, F32x16, F32x16)
def vmax(b, x, y):
    """Larger lane by lane (no NaN expected)."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@define(F32x16, F32x16, F32x16)
def vmax_or_inf(b, x, y):
    """As `vmax`, +inf where y is NaN."""
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


@define(types.int64, types.int64)
def count_ones(b, bits):
    """How many bits of a word are set."""
    return call(b, "llvm.ctpop.i64", I64, bits)


@define(I32x16, types.int64, types.int64)
def differing_bits(b, left, right):
    """In each lane how many bits differ between the words at two addresses, which may lie anywhere."""
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


@define(I32x16, I32x16)
def clamp_i8(b, v):
    """Lanes cut to [-127, 127]."""
    low, high = constant(VI, -127), constant(VI, 127)
    v = b.select(b.icmp_signed(">", v, low), v, low)
    return b.select(b.icmp_signed("<", v, high), v, high)


def emit_scatter(b, address, v, stride):
    """Store the elements of a small vector at `stride` bytes from each other."""
    for i in range(v.type.count):
        b.store(b.extract_element(v, ir.Constant(I32, i)), pointer(b, row(b, address, stride, i)), align=1)


@define(types.none, types.int64, I32x16, types.int64)
def scatter_i8x4(b, address, v, stride):
    """16 values as int8, in 4 groups of 4 bytes `stride` bytes apart."""
    emit_scatter(b, address, b.bitcast(b.trunc(v, ir.VectorType(I8, 16)), ir.VectorType(I32, 4)), stride)


@define(types.none, types.int64, I32x16, types.int64)
def scatter_i8(b, address, v, stride):
    """16 values as int8, `stride` bytes apart."""
    emit_scatter(b, address, b.trunc(v, ir.VectorType(I8, 16)), stride)


@define(types.none, types.int64, F32x16, types.int64)
def scatter_f32(b, address, v, stride):
    """16 floats, `stride` bytes apart."""
    emit_scatter(b, address, v, stride)


# -- scalars -----------------------------------------------------------------------------------------------------------


@define(types.float32, types.int64)
def f32_from_bits(b, bits):
    """The float whose bits are the low 32 of `bits`."""
    return b.bitcast(b.trunc(bits, I32), F32)


@define(types.float64, types.float32)
def widen(b, x):
    """float32 to float64."""
    return b.fpext(x, F64)


@define(types.float32, types.float64)
def narrow(b, x):
    """float64 to the nearest float32."""
    return b.fptrunc(x, F32)


@define(types.float64, types.int64)
def f64_of(b, n):
    """int64 to float64."""
    return b.sitofp(n, F64)


@define(types.int64, types.float64)
def i64_of(b, x):
    """float64 to int64, towards 0."""
    return b.fptosi(x, I64)


@define(types.float64, types.int64)
def f64_from_bits(b, bits):
    """The float64 with these bits."""
    return b.bitcast(bits, F64)


@define(types.int64, types.float64)
def bits_of_f64(b, x):
    """Bits of a float64."""
    return b.bitcast(x, I64)


@define(types.float64, types.float64, types.float64)
def div_f64(b, x, y):
    """x / y in float64, without Numba's check for zero."""
    return b.fdiv(x, y)


@define(types.int64, types.int64, types.int64)
def shift_right(b, bits, n):
    """Shift right, zeros coming in from the left."""
    return b.lshr(bits, n)


@define(types.int64, types.int64)
def trailing_zeros(b, bits):
    """Number of the lowest bit that is set; one is."""
    return call(b, "llvm.cttz.i64", I64, bits, ir.Constant(ir.IntType(1), 1))


@define(types.float32, types.float32)
def sqrt_f32(b, x):
    """Correctly rounded square root (an instruction everywhere)."""
    return call(b, "llvm.sqrt.f32", F32, x)


@define(types.float32, types.float32)
def abs_f32(b, x):
    """Absolute value."""
    return call(b, "llvm.fabs.f32", F32, x)


@define(types.float32, types.int64)
def f32_of(b, n):
    """int64 to float32."""
    return b.sitofp(n, F32)


@define(types.float32, types.float32, types.float32)
def max_f32(b, x, y):
    """The larger."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@define(types.float32, types.float32, types.float32)
def div_f32(b, x, y):
    """x / y in float32, without Numba's check for zero."""
    return b.fdiv(x, y)


@define(types.int64, types.int64, types.int64)
def div_i64(b, x, y):
    """x // y for x >= 0, y > 0, without Numba's check for zero (which would bring in symbols)."""
    return b.udiv(x, y)


# -- tiles -------------------------------------------------------------------------------------------------------------


def literal(n):
    """Value of a constant argument, or None."""
    return n.literal_value if isinstance(n, types.Literal) else None


def per_row(b, tile, values, step):
    """Build a tile from ``step(builder, vector, t)``."""
    for t in range(tile.n):
        values = b.insert_value(values, step(b, b.extract_value(values, t), t), t)
    return values
