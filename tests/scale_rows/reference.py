"""Its reference in NumPy."""

from __future__ import annotations

import numpy as np

from edgeinfer.kernels.reference import Expected, InstructionView
from edgeinfer.kernels.reference.view import float_of

from . import SCALE


def scale_rows(view: InstructionView) -> list[Expected]:
    p = view.parameters(SCALE)
    shape, strides = (view.count(p.rows), p.width), (p.stride, 4)
    x, out = (view.array(i, np.float32, shape, strides) for i in (0, 1))
    return [Expected("out", out, x * np.float32(float_of(p.factor)))]
