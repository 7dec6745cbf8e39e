"""References of the screened output head: largest estimates, the limit that a logit must be able to reach, and the
logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import layouts

from .. import abi
from ..parameters import LINEAR, SCREEN
from .elementwise import quantised_input
from .expected import Expected
from .matmul import Doubles, linear_values
from .view import InstructionView, memory

Floats = NDArray[np.float32]


def _screened(view: InstructionView) -> Iterator[int]:
    """Rows of which estimates are enough."""
    n = view.count(abi.COUNT_SAMPLES)
    roles = view.tokens(abi.TOKEN_ROLE)[view.outputs(n)]
    for r, spec in enumerate(view.sample_specs(n)):
        if spec and roles[r] == abi.ROLE_DECODE:
            screen, mask = (int(memory(spec + at, np.int64, (1,))[0]) for at in (abi.SAMPLE_SCREEN, abi.SAMPLE_MASK))
            if screen and not mask:
                yield r


def _estimates(view: InstructionView, p: Any, rows: int) -> Floats:
    return view.array(3, np.float32, (rows, p.vocab_size), (p.out_stride, 4)).copy()


def _work(view: InstructionView, p: Any, r: int, offset: int, n: int = 1) -> Floats:
    return view.array(5, np.float32, (n,), at=r * p.work_stride + offset)


def maxima_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``screen_maxima``."""
    p = view.parameters(SCREEN)
    estimates, starts = _estimates(view, p, view.count(abi.COUNT_SAMPLES)), range(0, p.vocab_size, abi.SAMPLE_CHUNK)
    return [Expected("maxima", _work(view, p, r, abi.SCREEN_MAXIMA, len(starts)),
                     np.maximum.reduceat(estimates[r], starts)) for r in _screened(view)]


def _logits(view: InstructionView, p: Any, dtype: str, group: int, tiles: range) -> tuple[Doubles, Doubles]:
    """Logits of some tiles for all rows, and how far float32 may be from them."""
    cols = 2 * group * p.records
    linear = LINEAR._replace(fused=0, rows=p.rows, x_stride=p.x_stride, group=group, token_tiles=p.token_tiles)
    x, _ = quantised_input(view, linear, cols, 0, 0)
    data = view.array(0, np.uint8, (len(tiles) * p.tile_bytes,), at=tiles.start * p.tile_bytes)
    w = layouts.unpack_tile16(data, dtype, group, (layouts.TILE_ROWS * len(tiles), cols),
                              view.stored(dtype, group).levels).astype(np.float64)
    return linear_values(x, w)


def reach(low: NDArray[Any], rank: int) -> float:
    """Return the factor of all bounds: the norm of 1, of low, and of the largest rounding errors of its first values.

    Parameters
    ----------
    low : of shape (width,)
    """
    low = low.astype(np.float64)
    largest = [float(np.abs(low[i : min(i + 32, rank)]).max()) for i in range(0, rank, 32)]
    errors = 32 * (1.01 * abi.SCREEN_ROUNDING / 254) ** 2 * np.square(largest).sum()
    return float(1.001 * np.sqrt(1 + np.square(low).sum() + errors))


def least_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``screen_least_<dtype>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p, n = view.parameters(SCREEN), view.count(abi.COUNT_SAMPLES)
        estimates, screened, expected = _estimates(view, p, n), set(_screened(view)), []
        for r in range(n):
            least, far, tolerance = -np.inf, 0.0, 0.0
            if r in screened:
                tile = int(estimates[r].argmax()) // 16
                logits, off = _logits(view, p, dtype, group, range(tile, tile + 1))
                known = min(16, p.vocab_size - 16 * tile)
                least, tolerance = float(logits[r, :known].max()), float(off[r, :known].max())
                far = reach(view.array(6, np.float32, (p.width,), at=r * p.low_stride), p.rank)
            expected += [Expected("least", _work(view, p, r, abi.SCREEN_LEAST), np.array([least]), exact=False,
                                  tolerance=tolerance),
                         Expected("reach", _work(view, p, r, abi.SCREEN_REACH), np.array([far]), exact=False,
                                  tolerance=1e-5 * far)]
        return expected

    return reference


def head_reference(dtype: str, group: int) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``head_<dtype>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(SCREEN)
        logits, tolerance = _logits(view, p, dtype, group, range(p.tiles))
        if view.count(abi.COUNT_SAMPLES):
            estimates = view.array(3, np.float32, logits.shape, (p.out_stride, 4)).copy()
            bounds = view.array(4, np.float32, (p.vocab_size,)).copy()
            for r in range(len(logits)):
                most = np.full(16 * p.tiles, -np.inf, np.float32)
                most[: p.vocab_size] = estimates[r, : p.vocab_size] + bounds * _work(view, p, r, abi.SCREEN_REACH)
                kept = np.repeat((most < _work(view, p, r, abi.SCREEN_LEAST)).reshape(-1, 16).all(axis=1), 16)
                logits[r, kept], tolerance[r, kept] = estimates[r, kept], 0
        return [Expected("out", view.array(2, np.float32, logits.shape, (p.out_stride, 4)), logits, exact=False,
                         tolerance=tolerance)]

    return reference
