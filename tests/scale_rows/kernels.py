"""The kernel: imported where kernels are compiled, and nowhere else."""

from __future__ import annotations

from edgeinfer.kernels.registry import kernel
from edgeinfer.kernels.vector.memory import load_f32, store_f32
from edgeinfer.kernels.vector.record import claim, count, float_parameter, operand, parameter

from . import SCALE


@kernel("scale_rows")
def scale_rows(rec, ctx, tid, n_threads):
    """out = x * factor, row by row."""
    x, out, stride = operand(rec, ctx, 0), operand(rec, ctx, 1), parameter(rec, SCALE.stride)
    t = claim(ctx)
    while t < count(ctx, parameter(rec, SCALE.rows)):
        for i in range(parameter(rec, SCALE.width)):
            store_f32(out + t * stride + 4 * i, load_f32(x + t * stride + 4 * i) * float_parameter(rec, SCALE.factor))
        t = claim(ctx)
    return 0
