"""References of the norms beyond the plain one: with the mean taken off, with a bias, in place, or added to a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..abi import FLAG_BIAS, FLAG_CENTRED, FLAG_RESIDUAL, FLAG_SCALED
from ..parameters import ROWS
from .elementwise import quantised_rows
from .expected import Expected
from .tolerances import TINY, TOLERANCES
from .view import InstructionView, float_of

Doubles = NDArray[np.float64]


def norm(x: NDArray, weight: NDArray, bias: NDArray | float, eps: float, centred: bool) -> tuple[Doubles, Doubles]:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias along the last axis (arXiv 1607.06450).

    Without `centred` nothing is taken off (arXiv 1910.07467).

    Returns
    -------
    y, tolerance : float64 arrays like x
    """
    x = x.astype(np.float64)
    size = np.abs(x)
    if centred:
        mean = x.mean(axis=-1, keepdims=True)
        x, size = x - mean, size + np.abs(x).mean(axis=-1, keepdims=True)
    scale = weight.astype(np.float64) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    y = x * scale
    return y + bias, TOLERANCES["rms_norm"] * (np.abs(y) + size * np.abs(scale) + np.abs(bias)) + TINY


def _normed(view: InstructionView) -> tuple[Doubles, Doubles]:
    p, n = view.parameters(ROWS), view.count(view.parameters(ROWS).rows)
    source = view.array(0, np.float32, (n, p.width), (p.in_stride, 4))
    bias = view.array(4, np.float32, (p.width,)).astype(np.float64) if view.flags & FLAG_BIAS else 0.0
    weight = view.array(2, np.float32, (p.width,))
    return norm(source, weight, bias, float_of(p.eps), bool(view.flags & FLAG_CENTRED))


def norm_f32_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``norm_f32``; rows that are not normed in place end in zeros up to a whole vector."""
    p = view.parameters(ROWS)
    if p.parts > 1:
        return _norm_parts(view)
    y, tolerance = _normed(view)
    in_place = view.address(0) == view.address(1)
    width = p.width if in_place else -(-p.width // 16) * 16
    out = view.array(1, np.float32, (len(y), width), (p.out_stride, 4))
    whole, slack = np.zeros((2, *out.shape))
    whole[:, : p.width], slack[:, : p.width] = y, tolerance
    if view.flags & FLAG_RESIDUAL:
        before = out[:, : p.width].astype(np.float64)
        whole[:, : p.width] += before
        slack[:, : p.width] += 1e-7 * np.abs(before)
    if view.flags & FLAG_SCALED:
        number = float(view.array(5, np.float32, (1,))[0])
        whole, slack = whole * number, (slack + 1e-7 * np.abs(whole)) * abs(number)
    return [Expected("out", out, whole, exact=False, tolerance=slack + TINY)]


def _norm_parts(view: InstructionView) -> list[Expected]:
    """Rows whose parts are normed one by one, added to the output with FLAG_RESIDUAL."""
    p, n = view.parameters(ROWS), view.count(view.parameters(ROWS).rows)
    shape, step = (n, p.parts, p.width), 4 * p.width
    source = view.array(0, np.float32, shape, (p.in_stride, step, 4))
    out = view.array(1, np.float32, shape, (p.out_stride, step, 4))
    bias = view.array(4, np.float32, (p.width,)).astype(np.float64) if view.flags & FLAG_BIAS else 0.0
    weight, centred = view.array(2, np.float32, (p.width,)), bool(view.flags & FLAG_CENTRED)
    y, slack = norm(source, weight, bias, float_of(p.eps), centred)
    if view.flags & FLAG_RESIDUAL:
        y, slack = y + out, slack + 1e-7 * np.abs(out)
    return [Expected("out", out, y, exact=False, tolerance=slack + TINY)]


def norm_q8_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``norm_q8``."""
    y, tolerance = _normed(view)
    return quantised_rows(view, y.astype(np.float32), exact=False, near=tolerance)
