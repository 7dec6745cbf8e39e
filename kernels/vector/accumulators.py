"""Accumulators of a block of m row tiles x n tokens: their starts, their scales, and the resulting floats.

They start with `start_*`, grow by the products of int8_dot.py, and are scaled by `scale_add` onto those of
`zero_products`; `in_rows` gives one vector per row tile and token in the end.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

from . import neon
from .pair_sums import is_vnni
from .simd import F32, I32, VF, VI, F32x16, I32x16, Tile, constant, literal, per_row, pointer, splat
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


def line_list(b, lines, value):
    """Return one line, or those of a tile, as a list."""
    return [b.extract_value(value, i) for i in range(lines.n)] if isinstance(lines, Tile) else [value]


def _start(make_tile, above):
    """Intrinsic ``(m, n, offsets)``: start of m x n accumulators.

    The int32 at offsets + 4 t is -8 x the sum of token t's activations of the group, and `above()` is the offset of
    multiplied codes above the weights' levels.
    """

    @intrinsic(prefer_literal=True)
    def start(context, m, n, offsets):
        row_tiles, tokens = literal(m), literal(n)
        if row_tiles is None or tokens is None:
            return None
        tile, distance = make_tile(I32x16, row_tiles, tokens), above()

        def lower(context, b, sig, args):
            out = ir.Constant(tile.llvm, None)
            for k in range(tile.n if distance else 0):
                offset = _of_tokens(b, tile, args[2], k % tokens, I32)
                if distance != 8:
                    offset = b.mul(b.ashr(offset, constant(VI, 3), flags=("exact",)), constant(VI, distance))
                out = b.insert_value(out, offset, k)
            return out

        return tile(m, n, offsets), lower

    return start


def _above_s8():
    return 128 if is_vnni() else 0


start_s8 = _start(_plain_tile, _above_s8)
start_u4 = _start(_plain_tile, lambda: 8)
start_int8 = _start(products_tile, _above_s8)


def start_codes(above):
    """Return `start_int8` for codes with this offset above their levels."""
    return _start(products_tile, lambda: above)


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
