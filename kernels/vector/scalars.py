"""Single numbers: conversions, bits, and arithmetic without Numba's checks, which would bring in symbols."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from .simd import F32, F64, I32, I64, call, define


@define(types.int64, types.int64)
def opaque(b, value):
    """The same value, opaque to the compiler: a loop of this many turns stays a loop."""
    kind = ir.FunctionType(I64, [I64])
    return b.asm(kind, "", "=r,0", [value], side_effect=False)


@define(types.int64, types.int64)
def count_ones(b, bits):
    """Return the number of set bits of a word."""
    return call(b, "llvm.ctpop.i64", I64, bits)


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
