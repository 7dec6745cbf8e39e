"""Gathering: rows whose logits are wanted.

Operands: 0 source, 1 out. Parameters: parameters.ROWS. Reference: reference/gather.py.
"""

from __future__ import annotations

from ..abi import CTX_OUTPUTS
from ..parameters import ROWS
from ..registry import kernel
from ..vector.instruction import claim, count, operand, parameter
from ..vector.memory import load_f32x16, load_i64, store_f32x16


@kernel("gather_outputs")
def gather_outputs(inst, ctx, tid, n_threads):
    """Copy the rows whose logits are wanted (ctx: list of token numbers)."""
    x, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    chosen = load_i64(ctx + CTX_OUTPUTS)
    t = claim(ctx)
    while t < rows:
        source = x + load_i64(chosen + 8 * t) * parameter(inst, ROWS.in_stride)
        target = out + t * parameter(inst, ROWS.out_stride)
        for i in range(0, parameter(inst, ROWS.width), 16):
            store_f32x16(target + 4 * i, load_f32x16(source + 4 * i))
        t = claim(ctx)
    return 0
