"""A screen of the output head: cheap estimates of all logits, and bounds of their errors.

With W the head, x its input and A any invertible matrix, W x = G z where G = W A^-1 and z = A x. A is taken as it is
rounded to int8, so that this holds for the stored matrices; the first columns of G, rounded to 4 bits, make the
estimates. The error of an estimate is the product of a row of G's rest and rounding errors with z, and of the kept part
of the row with the errors that z is rounded by: at most the product of two norms (Cauchy-Schwarz). The first is the
row's bound.

A orders directions by their variance: with C the covariance of x and C = M M', the largest eigenvectors U of
M' W' W M with eigenvalues l give A = l^(1/4) U' M^-1, which spreads weight evenly over G and z, for both are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnProgress
from edgeinfer.bundle import Bundle, HeadScreen
from edgeinfer.calibration.hooks import View
from edgeinfer.calibration.statistics import capture
from edgeinfer.errors import UnsupportedModelError, UsageError
from edgeinfer.graph import OUTER_TYPE, ScreenableHead, find_head, inner_type
from edgeinfer.kernels import abi, reference
from edgeinfer.quant import TILE_ROWS, WeightType, layouts, quantise
from edgeinfer.runtime import Session

from .ffn import stored_bytes
from .predictors import rounded

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
RIDGE = 1e-4
"""Added to the covariance, as a share of its mean diagonal: directions that the text never took."""
BLOCK_ROWS = 8192
"""Rows of the head that are unpacked at a time."""
SAMPLE_TOKENS, SAMPLE_TILES = 128, 1024
"""Inputs that ranks are compared on, and at most this many tiles of the head."""
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
"""Ranks that are tried, as shares of hidden_size."""
RANK_STEP = 2 * OUTER_TYPE.group_size
WORTH = 0.95
"""Share of the head's bytes from which on a screen does not pay for its instructions."""
UNIT = 2.0**-24
"""Relative error of an operation in float32."""


def make_screen(session: Session, bundle: Bundle, ids: Sequence[int], *, rank: int | None = None,
                on_progress: OnProgress = lambda *_: None) -> HeadScreen:
    """Make a screen of a bundle's head for the inputs that a text gives it.

    Parameters
    ----------
    session : of `open_plain`
    ids : the text's tokens
    rank : by default the rank that reads the fewest bytes
    on_progress : called with (stage, done, total, item)

    Raises
    ------
    UnsupportedModelError
        The head is not a matmul with codes, or screening it would read about as much as the head.
    UsageError
        No screen of this model has this rank.
    """
    found = find_head(session.graph)
    head = _Head(session, bundle, found)
    if rank is not None and not 1 <= rank <= head.cols:
        raise UsageError(f"rank is {rank}; it must be from 1 to hidden_size, {head.cols}.")
    covariance, rows = _inputs(session, found, head, ids, on_progress)
    inner = _directions(head, covariance)
    ranks = [rank] if rank is not None else sorted(
        {min(head.cols, -(-round(share * head.cols) // RANK_STEP) * RANK_STEP) for share in SHARES})
    costs, some = [], head.tiles(head.sample())
    largest = np.max([(rows @ block.T).max(axis=1) for _, block in head.blocks()], axis=0)
    for i, one in enumerate(ranks if rank is None else ()):
        factors = _Factors(head, inner, one, rows)
        costs.append(factors.nbytes / head.nbytes + factors.computed(some, largest))
        on_progress("ranks", i + 1, len(ranks), f"rank {one}")
    best = int(np.argmin(costs)) if costs else 0
    if rank is None and costs[best] > WORTH:
        raise UnsupportedModelError(f"Screening the head would read {costs[best]:.0%} of its bytes, at rank "
                                    f"{ranks[best]}: it does not pay. The model runs as it is.")
    return _Factors(head, inner, ranks[best], rows).screen(on_progress)


class _Head:
    """The output head as numbers."""

    def __init__(self, session: Session, bundle: Bundle, found: ScreenableHead):
        op, norm = found.head, bundle.tensors[found.norm.weight.name]
        self.norm: Floats = bundle.weights[norm.offset :][: norm.nbytes].view(np.float32)[: op.weight.shape[1]]
        self.longest = 1.03 * math.sqrt(op.weight.shape[1]) * float(np.abs(self.norm).max())
        """No input is longer: a norm's root mean square is 1 at most, and rounding adds less than 0.03."""
        self.stored: WeightType = session.graph.types[op.weight.name]
        self.rows, self.cols = op.weight.shape
        self.nbytes = self.stored.nbytes(op.weight.shape)
        self._data = stored_bytes(bundle, op.weight.name).reshape(-1, self.stored.tile_bytes(self.cols))

    def tiles(self, which: NDArray[np.intp] | slice) -> Floats:
        """Rows of some tiles, those after the last row of 0."""
        data = self._data[which]
        shape = (TILE_ROWS * len(data), self.cols)
        return layouts.unpack_tile16(np.ascontiguousarray(data).reshape(-1), self.stored.dtype, self.stored.group_size,
                                     shape, self.stored.levels)

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """All tiles, some at a time."""
        step = BLOCK_ROWS // TILE_ROWS
        for first in range(0, len(self._data), step):
            which = slice(first, min(first + step, len(self._data)))
            yield which, self.tiles(which)

    def sample(self) -> NDArray[np.intp]:
        """Some tiles from all over the head."""
        return np.unique(np.linspace(0, len(self._data) - 1, SAMPLE_TILES).astype(np.intp))


def _inputs(session: Session, found: ScreenableHead, head: _Head, ids: Sequence[int],
            on_progress: OnProgress) -> tuple[Doubles,
                                                                                                        Floats]:
    """Mean x x' of the head's inputs, as its matmul sees them, and some of them from all over the text.

    The hook reads the residual stream before the last norm, because a capture asks for no logits.
    """
    total, kept, every = np.zeros((head.cols, head.cols)), [], max(1, len(ids) // SAMPLE_TOKENS)

    def hook(view: View) -> None:
        x = view.values(found.gather.x)
        x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(found.norm.eps)) * head.norm
        seen = rounded(x, head.stored.group_size)
        total[...] += seen.T @ seen
        kept.append(seen[::every])

    source = next(op for op in session.graph.ops if op.out == found.gather.x)
    capture(session, ids, {source: [hook]}, progress=lambda done, n,
            _: on_progress("capture", done, n, "the head's input"))
    return total / len(ids), np.concatenate(kept)[:SAMPLE_TOKENS]


def _directions(head: _Head, covariance: Doubles) -> Doubles:
    """The matrix A before it is rounded, the most important directions first."""
    c = covariance + RIDGE * max(np.trace(covariance) / head.cols, 1e-30) * np.eye(head.cols)
    root = np.linalg.cholesky(c)
    squares = np.zeros_like(root)
    for _, rows in head.blocks():
        squares += rows.T @ rows
    values, vectors = np.linalg.eigh(root.T @ squares @ root / head.rows)
    values, vectors = np.maximum(values[::-1], 1e-12 * values[-1]), vectors[:, ::-1]
    inner: Doubles = values[:, None] ** 0.25 * np.linalg.solve(root.T, vectors).T
    return inner


def _four_bits(g: Doubles) -> tuple[NDArray[np.uint8], Floats]:
    """Return stored bytes of the thin matrix for some tiles of the head, and the numbers that they stand for."""
    kind, group = OUTER_TYPE.dtype, OUTER_TYPE.group_size
    codes, scales, _ = quantise.quantise(g.astype(np.float32), kind, group, "the screen of the head")
    packed = layouts.pack_tile16(codes, kind, group, scales)
    return packed, layouts.unpack_tile16(packed, kind, group, g.shape)


class _Factors:
    """A screen of one rank, and its results for some inputs."""

    def __init__(self, head: _Head, inner: Doubles, rank: int, rows: Floats):
        self._head, self.rank, self._rows = head, rank, rows
        kind, shape = inner_type(head.stored), (head.cols, head.cols)
        codes, scales, _ = quantise.quantise(self._balanced(inner).astype(np.float32), kind.dtype, kind.group_size,
                                             "the screen of the head")
        self.inner = layouts.pack_tile16(codes, kind.dtype, kind.group_size, scales)
        matrix = layouts.unpack_tile16(self.inner, kind.dtype, kind.group_size, shape).astype(np.float64)
        self._inverse = np.linalg.inv(matrix)
        low = (rows @ matrix.T).astype(np.float32)
        self._reach = np.array([[reference.reach(row, rank)] for row in low], np.float32)
        self._low = rounded(low[:, :rank])
        sums = 4 * (head.cols / 32 + rank / 32 + 8)  # operations in float32 on the way to a logit and to an estimate
        self._slack = sums * UNIT * float(np.linalg.norm(matrix)) * head.longest

    def _balanced(self, inner: Doubles) -> Doubles:
        """Weigh the omitted directions so that their errors and those of the kept ones meet equally large norms."""
        if self.rank == self._head.cols:
            return inner
        g, low = self._head.tiles(self._head.sample()) @ np.linalg.inv(inner), self._rows @ inner.T
        g[:, : self.rank] -= _four_bits(g[:, : self.rank])[1]
        kept, rest = (np.linalg.norm(low[:, part], axis=1).mean() / max(np.linalg.norm(g[:, part], axis=1).mean(), 1e-9)
                      for part in (slice(self.rank), slice(self.rank, None)))
        return np.concatenate([inner[: self.rank], inner[self.rank :] * np.sqrt(kept / rest)])

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads of it."""
        return self.inner.nbytes + OUTER_TYPE.nbytes((self._head.rows, self.rank)) + 4 * self._head.rows

    def factor(self, weights: Floats) -> tuple[NDArray[np.uint8], Floats, Floats]:
        """Return, for some tiles of the head, bytes of the thin matrix, bounds, and the estimates of the rows kept."""
        g = weights @ self._inverse
        whole = np.linalg.norm(g, axis=1)
        packed, kept = _four_bits(g[:, : self.rank])
        g[:, : self.rank] -= kept
        own = np.linalg.norm(kept.astype(np.float64), axis=1)
        bounds = np.sqrt(np.square(g).sum(axis=1) + np.square(own / abi.SCREEN_ROUNDING)
                         + np.square(self._slack * (whole + own)))
        return packed, (1.001 * bounds).astype(np.float32), self._low @ kept.T

    def computed(self, weights: Floats, largest: Floats) -> float:
        """Share of some tiles of the head in which a logit may be `largest`, of each of the rows kept."""
        _, bounds, estimates = self.factor(weights)
        return _wanted(estimates, bounds * self._reach, largest)

    def screen(self, on_progress: OnProgress) -> HeadScreen:
        """Make it for the whole head."""
        parts = []
        for which, weights in self._head.blocks():
            parts.append(self.factor(weights))
            on_progress("screen", which.stop, -(-self._head.rows // TILE_ROWS), "tiles")
        packed, bounds, estimates = (np.concatenate(part, axis=axis) for part, axis in zip(
            zip(*parts, strict=True), (0, 0, 1), strict=True))
        best = estimates[:, : self._head.rows].argmax(axis=1) // TILE_ROWS
        least = np.array([(self._head.tiles(np.array([tile])) @ row).max()
                          for tile, row in zip(best, self._rows, strict=True)])
        share = _wanted(estimates, bounds * self._reach, least)
        return HeadScreen(self.rank, share, self.inner, packed, bounds[: self._head.rows])


def _wanted(estimates: Floats, errors: Floats, least: Floats) -> float:
    """Share of the tiles in which an estimate is not surely below."""
    wanted = estimates + errors >= least[:, None]
    return float(wanted.reshape(len(least), -1, TILE_ROWS).any(axis=2).mean())
