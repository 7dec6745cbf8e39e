"""ALiBi (arXiv 2108.12409): by how much scores of attention fall with the distance between query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import AlibiConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def alibi_slopes(alibi: AlibiConfig, heads: int) -> NDArray[np.float32]:
    """Return the slope of each query head.

    Of n heads, a power of 2, head i has 2^(-max_bias (i + 1) / n). Of another number the first heads have the slopes of
    the power of 2 below it, and the rest every other slope of the one above it (the paper's own program).
    """
    import numpy as np

    below = 1 << (heads.bit_length() - 1)
    powers = np.concatenate([np.arange(1, below + 1) / below, np.arange(1, 2 * below, 2) / (2 * below)])[:heads]
    slopes = np.exp2(-alibi.max_bias * powers).astype(np.float32)
    return to_bfloat16(slopes) if alibi.bfloat16 else slopes


def alibi_bias(alibi: AlibiConfig, slope: float, scale: float, positions: NDArray[np.int64], position: int
               ) -> NDArray[np.float32]:
    """Return the bias of a head with this slope for the scores of keys at some positions and a query at one."""
    import numpy as np

    if not alibi.bfloat16:
        return (positions - position).astype(np.float32) * np.float32(slope)
    keys, query = (to_bfloat16(to_bfloat16(np.asarray(x, np.float32)) * np.float32(slope))
                   for x in (positions, [position]))
    keys -= query
    keys *= np.float32(scale)
    return keys


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round float32 to the nearest bfloat16, ties to even, and back."""
    import numpy as np

    bits = x.view(np.uint32)
    bits = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
