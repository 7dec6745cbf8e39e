"""References of the matmuls: `linear_*` is y = x W^T, `gated_*` is act(x G^T) * (x U^T)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import layouts

from ..abi import FLAG_APART, FLAG_BIAS, FLAG_RESIDUAL
from ..parameters import ACTIVATIONS, LINEAR
from .elementwise import apart_input, quantised_input
from .expected import Expected
from .tolerances import TINY, TOLERANCES
from .view import InstructionView, float_of

Doubles = NDArray[np.float64]

_erf: Any = np.frompyfunc(math.erf, 1, 1)


def _silu(x: Doubles, limit: float = 0.0) -> Doubles:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _gelu(x: Doubles, limit: float = 0.0) -> Doubles:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(np.float64))


def _gelu_tanh(x: Doubles, limit: float = 0.0) -> Doubles:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATION_FUNCTIONS: dict[str, Callable[..., Doubles]] = {
    "relu": lambda x, limit=0.0: np.maximum(x, 0),
    "silu": _silu,
    "relu2": lambda x, limit=0.0: np.maximum(x, 0) ** 2,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "drelu": lambda x, limit=0.0: np.maximum(x, 0),
    "fatrelu": lambda x, limit=0.0: np.where(x > limit, x, 0),
}
"""Hidden activations of a gate by name, on float64 arrays; the limit is that of fatrelu."""


OAI_ALPHA = float(np.float32(1.702))


def linear_values(
    x: Doubles, w: Doubles, bias: Doubles | float = 0.0, near: Doubles | float = 0.0
) -> tuple[Doubles, Doubles]:
    """y = x W^T + bias, and how far float32 may be from it.

    Parameters
    ----------
    x : float64 array of shape (T, cols)
    w : float64 array of shape (rows, cols)
    bias : float64 array of shape (rows,), optional
    near : float64 array like x, optional
        Largest deviation of x from the kernel's factors.

    Returns
    -------
    y, tolerance : float64 arrays of shape (T, rows)
    """
    share = TOLERANCES["linear"]
    tolerance = (share * np.abs(x) + near) @ np.abs(w).T + share * np.abs(bias) + TINY
    return x @ w.T + bias, tolerance


def gated_values(
    x: Doubles,
    gate: Doubles,
    up: Doubles,
    activation: str,
    gate_bias: Doubles | float = 0.0,
    up_bias: Doubles | float = 0.0,
    *,
    near: Doubles | float = 0.0,
    limit: float = 0.0,
) -> tuple[Doubles, Doubles]:
    """act(x G^T + b) * (x U^T + c), and how far float32 may be from it: shapes as in `linear_values`.

    With drelu the factor is rectified, too. If a gate is too near to fatrelu's limit to say, both are right.
    swiglu_oai clamps both, and adds 1 to the factor.
    """
    g, g_tolerance = linear_values(x, gate, gate_bias, near)
    u, u_tolerance = linear_values(x, up, up_bias, near)
    if activation == "swiglu_oai":
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + 1
        acted = _silu(OAI_ALPHA * g) / OAI_ALPHA
    else:
        acted = ACTIVATION_FUNCTIONS[activation](g, limit)
    if activation == "drelu":
        u = np.maximum(u, 0)
    slope = 2 * (np.abs(g) + g_tolerance) if activation == "relu2" else 1.2  # the steepest that the others are
    tolerance = slope * g_tolerance * (np.abs(u) + u_tolerance) + np.abs(acted) * u_tolerance
    if activation == "fatrelu":
        tolerance += np.abs(g * u) * (np.abs(g - limit) <= g_tolerance)
    return acted * u, tolerance + TOLERANCES["activation"] * (np.abs(acted) + np.abs(g)) * np.abs(u) + TINY


def activated_reference(x: Doubles, w: Doubles, activation: str, bias: Doubles | float = 0.0, *,
                        near: Doubles | float = 0.0, limit: float = 0.0) -> tuple[Doubles, Doubles]:
    """act(x W^T + b), and how far float32 may be from it: as `gated_values`, nothing being multiplied."""
    columns = np.zeros((1, w.shape[1]))
    return gated_values(x, w, columns, activation, bias, 1.0, near=near, limit=limit)


def _operands(view: InstructionView, dtype: str, group: int, tiles: int,
              head: int = 0) -> tuple[Doubles, Doubles, Doubles]:
    """x, dequantised, the weights of all tiles, both with the padding of the layout (zeros), and how far x may be.

    Of a `head` those of its own. Values apart and their weights are further columns.
    """
    p, stored = view.parameters(LINEAR), view.stored(dtype, group)
    cols = p.records * stored.padded_columns(1)
    data = view.array(0, np.uint8, (tiles * p.tile_bytes,), at=head * tiles * p.tile_bytes)
    w = layouts.unpack_tile16(data, dtype, group, (layouts.TILE_ROWS * tiles, cols), stored.levels).astype(np.float64)
    if group:
        x, near = quantised_input(view, p._replace(group=stored.input_group), cols, 5, 6, head * p.head_x)
    else:
        shape = view.count(p.rows), cols
        x = view.array(1, np.float32, shape, (p.x_stride, 4), at=head * p.head_x).astype(np.float64)
        near = np.zeros_like(x)
    if view.flags & FLAG_APART:
        shape = layouts.TILE_ROWS * tiles, p.left_out
        data = view.array(7, np.uint8, (64 * tiles * (-(-p.left_out // 2)),))
        apart = layouts.unpack_tile16(data, "f16", 0, shape)
        x, w = np.hstack([x, apart_input(view, p)]), np.hstack([w, apart.astype(np.float64)])
        near = np.hstack([near, np.zeros((len(x), p.left_out))])
    return x, w, near


def _bias(view: InstructionView, rows: int) -> Doubles | float:
    return view.array(3, np.float32, (rows,)).astype(np.float64) if view.flags & FLAG_BIAS else 0.0


def _heads(view: InstructionView, dtype: str, group: int) -> list[Expected]:
    """Each head's own matmul: its tiles, its x, its columns of the output."""
    p, found = view.parameters(LINEAR), []
    rows = layouts.TILE_ROWS * p.head_tiles
    for head in range(p.tiles // p.head_tiles):
        x, w, near = _operands(view, dtype, group, p.head_tiles, head)
        y, tolerance = linear_values(x, w, 0.0, near)
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4), at=head * (4 * rows + p.head_gap))
        found.append(Expected(f"out of head {head}", out, y, exact=False, tolerance=tolerance))
    return found


def linear_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``linear_<dtype>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(LINEAR)
        if p.head_tiles:
            return _heads(view, dtype, group)
        rows = layouts.TILE_ROWS * p.tiles
        x, w, near = _operands(view, dtype, group, p.tiles)
        y, tolerance = linear_values(x, w, _bias(view, rows), near)
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        if view.flags & FLAG_RESIDUAL:
            tolerance += 1e-7 * np.abs(out)
            y += out
        return [Expected("out", out, y, exact=False, tolerance=tolerance)]

    return reference


def gated_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``gated_<dtype>``: tiles of gate and up alternate, and so do those of the bias."""
    names = {number: name for name, number in ACTIVATIONS.items()}

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(LINEAR)
        rows = layouts.TILE_ROWS * p.tiles
        x, w, near = _operands(view, dtype, group, 2 * p.tiles)
        gate, up = w.reshape(p.tiles, 2, layouts.TILE_ROWS, -1).transpose(1, 0, 2, 3).reshape(2, rows, -1)
        bias = np.broadcast_to(_bias(view, 2 * rows), 2 * rows)
        biases = bias.reshape(p.tiles, 2, layouts.TILE_ROWS).transpose(1, 0, 2).reshape(2, rows)
        y, tolerance = gated_values(x, gate, up, names[p.activation], *biases, near=near,
                                       limit=float_of(p.limit))
        out = view.array(2, np.float32, y.shape, (p.out_stride, 4))
        return [Expected("out", out, y, exact=False, tolerance=tolerance)]

    return reference
