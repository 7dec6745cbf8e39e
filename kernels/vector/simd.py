"""Vectors as Numba types: kernels written in Python compile to the vector instructions that they spell out.

Imported only while kernels are built. A `Vec` is an LLVM vector in a register; a `Tile` is n of them (LLVM keeps each
in a register of its own). Addresses are int64: kernels have no arrays, so their objects have no symbols. Here are the
types, their operators, and the emitters that intrinsics are made of; the intrinsics are grouped by their operands:
`memory.py`, `lanes.py`, `scalars.py`, `tiles.py`. Operations that differ between instruction sets are in `targets.py`;
everything here is target-neutral LLVM.
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

# -- tiles -------------------------------------------------------------------------------------------------------------


def literal(n):
    """Value of a constant argument, or None."""
    return n.literal_value if isinstance(n, types.Literal) else None


def per_row(b, tile, values, step):
    """Build a tile from ``step(builder, vector, t)``."""
    for t in range(tile.n):
        values = b.insert_value(values, step(b, b.extract_value(values, t), t), t)
    return values
