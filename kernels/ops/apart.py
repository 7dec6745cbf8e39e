"""Products of the values of a row that are multiplied apart: outliers, which stay f32, by columns in f16.

They are added to a register block before it is stored. A matmul of their own would write all outputs and read them
again, and prompts wait for that memory: 5.8 MB for the gates and ups of 128 tokens in TinyLlama's shape.
"""

from __future__ import annotations

from ..abi import FLAG_APART
from ..parameters import LINEAR
from ..vector.instruction import flags, inline, parameter
from ..vector.targets import fma_column
from .dot_products import asking
from .elementwise import apart_of


def adding_apart(n, m):
    """Return a function that adds them to a block: of row tiles from `tile` on, by n tokens whose rows are at `base`.

    `pair` and `pairs` are how many tiles lie between row tiles (`simd.row_tile`), `following` how many further those
    are that come next, whose columns are asked for: they are too few for the hardware to see a stream.
    """
    ask = asking(m)

    @inline
    def add(acc, at, tile, base, pair, pairs, following):
        inst = at.inst
        if flags(inst) & FLAG_APART:
            columns = parameter(inst, LINEAR.left_out)
            size = 64 * (columns + 1 >> 1)
            w = at.apart + tile * size
            x = base + n * apart_of(parameter(inst, LINEAR.x_scales), parameter(inst, LINEAR.x_offsets))
            for i in range(columns):
                if i & 1 == 0:
                    ask(w + 32 * i, size * following, (size * pair, size * pairs))
                acc = fma_column(acc, m, w + 32 * i, (size * pair, size * pairs), x + 4 * n * i)
        return acc

    return add


@inline
def nothing_apart(acc, at, tile, base, pair, pairs, following):
    """Add nothing: for matmuls whose rows have no values apart."""
    return acc
