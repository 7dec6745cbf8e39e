"""Reference of the gated norm."""

from __future__ import annotations

import numpy as np

from ...parameters import GATED_NORM
from ..expected import Expected
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of
from .causal_conv import sigmoid


def gated_norm_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``gated_norm``."""
    p = view.parameters(GATED_NORM)
    shape = (view.count(p.rows), p.width // p.group, p.group)
    x = view.array(0, np.float32, shape, (p.x_stride, 4 * p.group, 4)).astype(np.float64)
    gate = view.array(1, np.float32, shape, (p.gate_stride, 4 * p.group, 4), 4 * p.start).astype(np.float64)
    by = sigmoid(gate) * (1.0 if p.sigmoid else gate)
    y = x * by if p.gated_first else x
    if p.normed:
        weight = view.array(3, np.float32, (p.group if p.normed == 2 else p.width,)).astype(np.float64)
        weight = weight if p.normed == 2 else weight.reshape(shape[1:])
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + float_of(p.eps)) * weight
    y = y if p.gated_first else y * by
    out = view.array(2, np.float32, shape, (p.out_stride, 4 * p.group, 4))
    slack = (TOLERANCES["rms_norm"] + TOLERANCES["activation"]) * np.abs(y) + TINY
    return [Expected("out", out, y, exact=False, tolerance=slack)]
