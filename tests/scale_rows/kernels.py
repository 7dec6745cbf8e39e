"""The kernel: imported where kernels are compiled, and nowhere else."""

from __future__ import annotations

from edgeinfer.kernels.registry import kernel
from edgeinfer.kernels.vector.instruction import claim, count, float_parameter, operand, parameter
from edgeinfer.kernels.vector.memory import load_f32, store_f32

from . import SCALE


@kernel("scale_rows")
def scale_rows(inst, ctx, tid, n_threads):
    """out = x * factor, row by row."""
    x, out, stride = operand(inst, ctx, 0), operand(inst, ctx, 1), parameter(inst, SCALE.stride)
    t = claim(ctx)
    while t < count(ctx, parameter(inst, SCALE.rows)):
        for i in range(parameter(inst, SCALE.width)):
            store_f32(out + t * stride + 4 * i, load_f32(x + t * stride + 4 * i) * float_parameter(inst, SCALE.factor))
        t = claim(ctx)
    return 0
