"""References of functions of single values of rows, and of learned positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..abi import FLAG_TIMES, TOKEN_POSITION
from ..parameters import POSITIONS, VALUE_FUNCTIONS, VALUES
from .expected import Expected
from .matmul import ACTIVATION_FUNCTIONS
from .tolerances import TINY, TOLERANCES
from .view import InstructionView, float_of

Doubles = NDArray[np.float64]


def soft_cap(x: Doubles, cap: float) -> Doubles:
    """cap x tanh(x / cap): nearly x where that is small, never beyond the cap (Gemma 2, arXiv 2408.00118)."""
    return cap * np.tanh(x / cap)


def activate_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``activate``; whole vectors are written, zeros after rows that are multiplied by others."""
    if not view.flags & FLAG_TIMES:
        return _activated(view)
    p, (made,) = view.parameters(VALUES), _activated(view)
    by = np.zeros(made.where.shape)
    by[:, : p.width] = view.array(1, np.float32, (len(by), p.width), (p.by_stride, 4))
    values = np.asarray(made.values, np.float64)
    slack = (0.0 if made.tolerance is None else made.tolerance) * np.abs(by)
    return [Expected("rows", made.where, values * by, exact=False, tolerance=slack + 1e-7 * np.abs(values * by) + TINY)]


def _activated(view: InstructionView) -> list[Expected]:
    p = view.parameters(VALUES)
    name = {number: name for name, number in VALUE_FUNCTIONS.items()}[p.function]
    where = view.array(0, np.float32, (view.count(p.rows), -(-p.width // 16) * 16), (p.stride, 4))
    x, factor = where.astype(np.float64), float_of(p.factor)
    if name == "scale":
        return [Expected("rows", where, x * factor, exact=False, tolerance=1e-7 * np.abs(x * factor) + TINY)]
    if name == "soft_cap":
        slack = TOLERANCES["soft_cap"] * factor + 1e-7 * np.abs(x)
        return [Expected("rows", where, soft_cap(x, factor), exact=False, tolerance=slack)]
    if name == "fatrelu":  # one comparison
        return [Expected("rows", where, np.where(where > np.float32(factor), where, np.float32(0)))]
    slack = TOLERANCES["activation"] * (np.abs(x) + x * x * (name == "relu2")) + TINY
    return [Expected("rows", where, ACTIVATION_FUNCTIONS[name](x, factor), exact=False, tolerance=slack)]


def positions_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``add_positions``: one float32 addition a value."""
    p, n = view.parameters(POSITIONS), view.count(view.parameters(POSITIONS).rows)
    positions = view.tokens(TOKEN_POSITION)[:n] + p.offset
    rows = view.array(0, np.float32, (n, p.width), (p.stride, 4))
    tiles = view.array(1, np.float32, (int(positions.max(initial=-1)) // 16 + 1, p.width, 16), (p.tile_bytes, 64, 4))
    return [Expected("rows", rows, rows + tiles[positions // 16, :, positions % 16])]
