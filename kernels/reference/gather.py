"""Reference of the gathering of rows."""

from __future__ import annotations

import numpy as np

from ..parameters import ROWS
from .expected import Expected
from .view import InstructionView


def gather_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``gather_outputs``; whole vectors are copied."""
    p = view.parameters(ROWS)
    chosen = view.outputs(view.count(p.rows))
    width = -(-p.width // 16) * 16
    source = view.array(0, np.float32, (int(chosen.max(initial=-1)) + 1, width), (p.in_stride, 4))
    out = view.array(1, np.float32, (len(chosen), width), (p.out_stride, 4))
    return [Expected("out", out, source[chosen])]
