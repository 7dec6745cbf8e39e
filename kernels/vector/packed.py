"""Products of codes of fewer than 8 bits with int8 activations, and their scales: one body for all types.

Codes become bytes in registers, 64 of a step of 4 columns at a time: their lowest bits, with the others, or the level
that a table has for them. From there on they are multiplied as in `int8_dot`, so that all instruction sets are served
and all integers are exact.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from edgeinfer.quant import StorageType

from ..abi import INST_LEVELS, N_LEVELS
from . import neon
from .accumulators import PairTile, in_pairs, start_codes
from .int8_dot import dot_block, dot_s8_line, dot_u8_line, nibbles
from .packed_formats import FORMS, chain_of, is_fine, lift_of
from .pair_sums import has_pair_sums, is_vnni, pair_block, widen_block
from .simd import (
    F32,
    I8,
    I16,
    I32,
    VB,
    VF,
    VI,
    F32x16,
    Tile,
    call,
    constant,
    half,
    join,
    literal,
    pointer,
    row_tile,
    splat,
)
from .small_groups import unsigned_codes
from .targets import emit_fma, emit_widen_f16, has

_EIGHTH = -0.125
"""Offsets of activations are -8 x their sum."""


# -- codes -------------------------------------------------------------------------------------------------------------


def _piece(b, line, bits: int, step: int, low: int):
    """The piece of a code of each byte that a step has in a line, moved to bit `low`; x86 shifts words, not bytes."""
    left = low - bits * step
    words = ir.VectorType(I16, 32)
    wide = b.bitcast(line, words)
    moved = b.shl(wide, constant(words, left)) if left > 0 else b.lshr(wide, constant(words, -left))
    return b.and_(b.bitcast(moved, VB), constant(VB, ((1 << bits) - 1) << low))


def _lift(form: StorageType) -> int:
    """Return how far a table's levels are lifted; a byte of its own has the sign bit flipped, which adds 128."""
    return 128 if is_vnni() else lift_of(form) if has_pair_sums() else 0


def _table(b, form: StorageType, inst):
    """The 16 levels of codes, perhaps fewer, in a register: those of the type, or of the instruction's matrix.

    Where weights are multiplied as unsigned bytes, they become so here and not in each line.
    """
    kind = ir.VectorType(I8, N_LEVELS)
    if not form.fitted:
        return ir.Constant(kind, [level + _lift(form) for level in form.table])
    load = b.load(pointer(b, inst, INST_LEVELS), typ=kind, align=8)
    load.set_metadata("invariant.load", b.module.add_metadata([]))  # an instruction never changes
    return b.xor(load, constant(kind, -128)) if is_vnni() else load


def _levels(b, codes, table):
    """The level of each code, 0 .. 15."""

    def constants(n):
        return b.shuffle_vector(table, table, ir.Constant(ir.VectorType(I32, n), [lane % 16 for lane in range(n)]))

    if has("avx512bw"):
        return call(b, "llvm.x86.avx512.pshuf.b.512", VB, constants(64), codes)
    if has("avx2"):
        parts = [half(b, codes, start, 32) for start in (0, 32)]
        return join(b, *(call(b, "llvm.x86.avx2.pshuf.b", part.type, constants(32), part) for part in parts))
    if has("neon"):
        parts = [call(b, "llvm.aarch64.neon.tbl1.v16i8", neon.BYTES, constants(16), half(b, codes, start, 16))
                 for start in (0, 16, 32, 48)]
        return join(b, join(b, *parts[:2]), join(b, *parts[2:]))
    levels = [splat(b, b.extract_element(table, ir.Constant(I32, code)), VB) for code in range(N_LEVELS)]
    out = levels[0]
    for code, level in enumerate(levels[1:], 1):
        out = b.select(b.icmp_unsigned("==", codes, constant(VB, code)), level, out)
    return out


def _steps(b, form: StorageType, line, further, at: int, table):
    """The bytes to be multiplied of steps 2 `at` and 2 `at` + 1 of a run; `line` has their lowest bits."""
    low, steps = form.planes[0], (2 * at, 2 * at + 1)
    codes = nibbles(b, line) if low == 4 else tuple(_piece(b, line, low, step % (8 // low), 0) for step in steps)
    if further is not None:
        pieces = (_piece(b, further, form.planes[1], step, low) for step in steps)
        codes = tuple(b.or_(code, piece) for code, piece in zip(codes, pieces, strict=True))
    if table is not None:
        return tuple(_levels(b, code, table) for code in codes)
    if is_fine(form) and not unsigned_codes():
        codes = tuple(b.sub(code, constant(VB, form.offset)) for code in codes)
    return codes


def paired_runs(name: str, group: int) -> int:
    """Runs whose products are added in sums of 16 bits (`pair_sums.has_pair_sums`) from one to the next; 0: not even
    those of one."""
    form = FORMS[name]
    return min(chain_of(form) // form.run_steps, form.group_runs(group)) if has_pair_sums() else 0


@cache
def dot_run(name: str, paired: bool = False):
    """Intrinsic ``(block, m, address, apart, x, inst)``: add the products of a run of each of m row tiles (`row_tile`).

    The activations of its steps follow each other from x on, as in `int8_dot.dot_block`. m is a constant. `paired`: the
    block has sums of 16 bits, as `zero_sums` starts and `widen_pairs` ends them.
    """
    form = FORMS[name]
    signed = form.indexed and not _lift(form)
    few = chain_of(form) // 2 if has_pair_sums() and not paired else 0
    dot, small = (dot_s8_line, neon.by_smull) if signed else (dot_u8_line, neon.by_smlal)

    @intrinsic(prefer_literal=True)
    def add_run(context, block, m, address, apart, x, inst):
        count = literal(m)
        if count is None or not isinstance(block, Tile | PairTile):
            return None

        def lower(context, b, sig, args):
            block_value, _, first, distances, activations, instruction = args
            table = _table(b, form, instruction) if form.indexed else None
            tiles = [row_tile(b, first, distances, i) for i in range(count)]

            def line(i, number):
                return b.load(pointer(b, tiles[i], 64 * number), typ=VB, align=64)

            more = [line(i, form.first_lines) if len(form.planes) > 1 else None for i in range(count)]
            pairs = ir.Constant(block.llvm, None)
            for at in range(form.run_steps // 2):
                both = [_steps(b, form, line(i, at * form.planes[0] // 4), more[i], at, table) for i in range(count)]
                address = b.add(activations, ir.Constant(ir.IntType(64), 8 * (block.n // count) * at)) if at \
                    else activations
                if paired:
                    block_value = pair_block(b, block, block_value, both, address, signed)
                elif few:
                    pairs = pair_block(b, block, pairs, both, address, signed)
                    if (at + 1) % few == 0 or at + 1 == form.run_steps // 2:
                        block_value = widen_block(b, block, block_value, pairs)
                        pairs = ir.Constant(block.llvm, None)
                else:
                    block_value = dot_block(b, block, block_value, both, address, dot, small)
            return block_value

        return block(block, m, address, apart, x, inst), lower

    return add_run


@cache
def start_of(name: str):
    """Intrinsic ``(m, n, offsets)``: start of a group's sums, minus the offset of codes above their levels."""
    form = FORMS[name]
    return start_codes(_lift(form) if form.indexed else form.offset)


# -- factors -----------------------------------------------------------------------------------------------------------


def _nested(signed: bool):
    """Intrinsic ``(m, address, outer, apart)``: 16 bytes of each of m row tiles times the fp16 numbers at `outer`."""

    @intrinsic(prefer_literal=True)
    def load(context, m, address, outer, apart):
        count = literal(m)
        if count is None:
            return None
        tile = Tile(F32x16, count)

        def lower(context, b, sig, args):
            out = ir.Constant(tile.llvm, ir.Undefined)
            for i in range(count):
                inner, halves = (pointer(b, row_tile(b, args[k], args[3], i)) for k in (1, 2))
                wide = (b.sext if signed else b.zext)(b.load(inner, typ=ir.VectorType(I8, 16), align=16), VI)
                whole = emit_widen_f16(b, b.load(halves, typ=ir.VectorType(I16, 16), align=2))
                out = b.insert_value(out, b.fmul(b.sitofp(wide, VF), whole), i)
            return out

        return tile(m, address, outer, apart), lower

    return load


load_nested = {"u8*f16": _nested(False), "i8*f16": _nested(True)}
"""Loaders by the kind of the scales."""


@intrinsic
def minimum_add(context, acc, minima, x_scales, offsets):
    """acc + minimum of the row tile * (sum of a group's activations of the token), as `accumulators.scale_add` has it.

    The sum is that of the int8 values, which the int32 at offsets + 4 t has times -8, times their scale.
    """
    if not isinstance(acc, Tile | PairTile) or not isinstance(minima, Tile):
        return None
    n = acc.n // minima.n

    def lower(context, b, sig, args):
        numbers, floats = ir.VectorType(I32, n), ir.VectorType(F32, n)
        scales = b.load(pointer(b, args[2]), typ=floats, align=4)
        sums = b.sitofp(b.load(pointer(b, args[3]), typ=numbers, align=4), floats)
        sums = b.fmul(sums, b.fmul(scales, constant(floats, _EIGHTH)))
        out = args[0]
        for t in range(n):
            pair = isinstance(acc, PairTile)
            x = neon.pick(b, sums, sums, [t - t % 2, t - t % 2 + 1] * 8 if pair else [t] * 16)
            for i in range(minima.n):
                k = i * n + t
                w = b.extract_value(args[1], i)
                if pair:
                    w = in_pairs(b, w, t)
                out = b.insert_value(out, emit_fma(b, w, x, b.extract_value(out, k)), k)
        return out

    return acc(acc, minima, x_scales, offsets), lower


@cache
def level_of(name: str):
    """Intrinsic ``(code, inst)``: the level of one code, as int64."""
    form = FORMS[name]

    @intrinsic
    def level(context, code, inst):
        def lower(context, b, sig, args):
            if not form.indexed:
                return b.sub(args[0], ir.Constant(ir.IntType(64), form.offset))
            if form.fitted:
                at = b.add(b.add(args[1], args[0]), ir.Constant(ir.IntType(64), INST_LEVELS))
                return b.sext(b.load(pointer(b, at), typ=I8, align=1), ir.IntType(64))
            table = ir.Constant(ir.VectorType(I32, 16), list(form.table))
            return b.sext(b.extract_element(table, b.trunc(args[0], I32)), ir.IntType(64))

        return types.int64(code, inst), lower

    return level
