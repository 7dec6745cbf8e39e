"""Dot products of one line after the other in several chains of accumulators.

A tile of few rows has few accumulators, and each product would wait for the one before (4-5 cycles, where two could
start every cycle). So consecutive lines go to c chains, which are added in the end; integers make the order free.
"""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from . import neon
from .accumulators import line_list
from .int8_dot import dot_block, dot_s8_line
from .simd import I32x16, Tile, literal, row


@intrinsic(prefer_literal=True)
def add_chains(context, chains, start):
    """c chains of accumulators: `start` (a tile of n) and zeros."""
    c = literal(chains)
    if c is None or not isinstance(start, Tile):
        return None
    tile = Tile(I32x16, c * start.n)

    def lower(context, b, sig, args):
        out = ir.Constant(tile.llvm, None)
        for t in range(start.n):
            out = b.insert_value(out, b.extract_value(args[1], t), t)
        return out

    return tile(chains, start), lower


@intrinsic
def dot_chains(context, acc, lines, x):
    """Chain i += line i times 4 int8 of each of n rows, which are at x + 4 n i + 4 t."""
    if not (isinstance(acc, Tile) and isinstance(lines, Tile)):
        return None
    c = lines.n
    n = acc.n // c
    part = Tile(acc.vec, n)

    def lower(context, b, sig, args):
        out = args[0]
        for i, line in enumerate(line_list(b, lines, args[1])):
            mine = ir.Constant(part.llvm, ir.Undefined)
            for t in range(n):
                mine = b.insert_value(mine, b.extract_value(out, i * n + t), t)
            at = row(b, args[2], ir.Constant(args[2].type, 4 * n), i)
            mine = dot_block(b, part, mine, [(line,)], at, dot_s8_line, neon.by_smull)
            for t in range(n):
                out = b.insert_value(out, b.extract_value(mine, t), i * n + t)
        return out

    return acc(acc, lines, x), lower


@intrinsic(prefer_literal=True)
def sum_chains(context, chains, acc):
    """The sum of the chains: a tile of n."""
    c = literal(chains)
    if c is None or not isinstance(acc, Tile):
        return None
    n = acc.n // c
    tile = Tile(acc.vec, n)

    def lower(context, b, sig, args):
        out = ir.Constant(tile.llvm, ir.Undefined)
        for t in range(n):
            total = b.extract_value(args[1], t)
            for i in range(1, c):
                total = b.add(total, b.extract_value(args[1], i * n + t))
            out = b.insert_value(out, total, t)
        return out

    return tile(chains, acc), lower
