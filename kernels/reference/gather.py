"""References of the gathering of rows and columns."""

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


def gather_columns_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``gather_columns``; whole vectors are written."""
    p = view.parameters(ROWS)
    columns = view.array(2, np.int32, (p.width,))
    source = view.array(0, np.float32, (view.count(p.rows), int(columns.max()) + 1), (p.in_stride, 4))
    out = view.array(1, np.float32, (len(source), -(-p.width // 16) * 16), (p.out_stride, 4))
    wanted = np.zeros(out.shape, np.float32)
    wanted[:, : p.width] = source[:, columns]
    return [Expected("out", out, wanted)]
