"""Loads, stores and scatters of numbers and vectors at addresses, and asking for memory ahead."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .simd import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    VB,
    VF,
    VI,
    F32x16,
    I8x64,
    I32x16,
    call,
    define,
    literal,
    pointer,
    row,
    splat,
)


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


@intrinsic(prefer_literal=True)
def stack_room(context, nbytes):
    """Address of so many bytes of the stack, a constant, which are the caller's until it returns."""
    size = literal(nbytes)
    if size is None:
        return None

    def lower(context, b, sig, args):
        room = cgutils.alloca_once(b, ir.ArrayType(I8, size))
        room.align = 64
        return b.ptrtoint(room, I64)

    return types.int64(nbytes), lower


@define(types.none, types.int64)
def prefetch(b, address):
    """Ask for the cache line at `address` (reading, all levels)."""
    one, three = ir.Constant(I32, 1), ir.Constant(I32, 3)
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address), ir.Constant(I32, 0), three, one)


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
