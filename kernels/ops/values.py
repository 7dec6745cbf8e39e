"""Operations on single values of rows: activations without a gate, scales, soft caps; and learned positions.

Operands of `activate`: 0 rows, in place, 1 factors (FLAG_TIMES). Parameters: parameters.VALUES. Of `add_positions`:
0 rows, in place, 1 table; parameters.POSITIONS. Reference: reference/values.py.
"""

from __future__ import annotations

from ..abi import FLAG_TIMES, TOKEN_POSITION, VALUES_OF_A_UNIT
from ..parameters import POSITIONS, VALUE_FUNCTIONS, VALUES
from ..registry import kernel
from ..vector.instruction import claim, count, flags, float_parameter, inline, operand, outlined, parameter, token
from ..vector.lanes import keep_first, splat_f32
from ..vector.memory import load_f32, load_f32x16, store_f32, store_f32x16
from ..vector.scalars import div_i64
from ..vector.vecmath import activate, soft_cap

SCALE, SOFT_CAP = VALUE_FUNCTIONS["scale"], VALUE_FUNCTIONS["soft_cap"]


@inline
def _value(x, kind, factor):
    if kind == SCALE:
        return x * splat_f32(factor)
    if kind == SOFT_CAP:
        return soft_cap(x, factor)
    return activate(x, kind, factor)


@outlined
def _some(x, end, kind, factor):
    """Whole vectors from an address to another."""
    while x < end:
        store_f32x16(x, _value(load_f32x16(x), kind, factor))
        x += 64


@outlined
def _times(x, end, by, width):
    """Multiply whole vectors by the values at another address, of which there are `width`, and by 0 after them."""
    while x < end:
        store_f32x16(x, load_f32x16(x) * keep_first(load_f32x16(by), width))
        x, by, width = x + 64, by + 64, width - 16


@kernel("activate")
def activate_rows(inst, ctx, tid, n_threads):
    """A function of each value of f32 rows, in place, perhaps times that of another tensor.

    A unit is a part of a row, because there may be one long row.
    """
    x, stride = operand(inst, ctx, 0), parameter(inst, VALUES.stride)
    kind, factor = parameter(inst, VALUES.function), float_parameter(inst, VALUES.factor)
    nbytes = (4 * parameter(inst, VALUES.width) + 63) & -64
    parts = div_i64(nbytes + 4 * VALUES_OF_A_UNIT - 1, 4 * VALUES_OF_A_UNIT)
    units = count(ctx, parameter(inst, VALUES.rows)) * parts
    unit = claim(ctx)
    while unit < units:
        t = div_i64(unit, parts)
        row, begin = x + t * stride, (unit - t * parts) * 4 * VALUES_OF_A_UNIT
        end = row + min(begin + 4 * VALUES_OF_A_UNIT, nbytes)
        _some(row + begin, end, kind, factor)
        if flags(inst) & FLAG_TIMES:
            by = operand(inst, ctx, 1) + t * parameter(inst, VALUES.by_stride) + begin
            _times(row + begin, end, by, parameter(inst, VALUES.width) - (begin >> 2))
        unit = claim(ctx)
    return 0


@kernel("add_positions")
def add_positions(inst, ctx, tid, n_threads):
    """Add to each token's row the row of its position in a table of floats in tile16 (a row is 1/16 of each line)."""
    x, table, width = operand(inst, ctx, 0), operand(inst, ctx, 1), parameter(inst, POSITIONS.width)
    rows = count(ctx, parameter(inst, POSITIONS.rows))
    t = claim(ctx)
    while t < rows:
        row = x + t * parameter(inst, POSITIONS.stride)
        number = token(ctx, t, TOKEN_POSITION) + parameter(inst, POSITIONS.offset)
        source = table + (number >> 4) * parameter(inst, POSITIONS.tile_bytes) + 4 * (number & 15)
        for i in range(width):
            store_f32(row + 4 * i, load_f32(row + 4 * i) + load_f32(source + 64 * i))
        t = claim(ctx)
    return 0
