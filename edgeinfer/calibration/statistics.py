"""Statistics of activations over a text, for calibration: sparsity, quantisation, pruning.

Each statistic is a visit (hooks.py) that adds the rows of a tensor up and keeps nothing of a token but its counts.
Statistics that do not fit in memory for all layers at once are captured in groups of layers: the text is run once for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import RequestError
from edgeinfer.graph import Op, Tensor
from edgeinfer.runner import DECODE, Segment

from ..base.progress import OnStageProgress
from ..runtime import Session
from .hooks import Hook, HookedRunner, View

T = TypeVar("T")


class Firing:
    """Counts of the non-zero values of a tensor.

    Attributes
    ----------
    counts : int64 array of shape (width,)
    tokens : int
    """

    def __init__(self, tensor: Tensor):
        self.tensor, self.tokens = tensor, 0
        self.counts: NDArray[np.int64] = np.zeros(tensor.width, np.int64)

    def __call__(self, view: View) -> None:
        """Add the rows of a forward pass."""
        self.tokens += view.tokens
        self.counts += np.count_nonzero(view.floats(self.tensor), axis=0)


class Largest:
    """The largest magnitude of each value of a tensor: `values`, float32 of shape (width,)."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.values: NDArray[np.float32] = np.zeros(tensor.width, np.float32)

    def __call__(self, view: View) -> None:
        """Add the rows of a forward pass."""
        np.maximum(self.values, np.abs(view.values(self.tensor)).max(axis=0), out=self.values)


class Covariance:
    """C = mean x x^T of a tensor's rows, not centred: the weights of the squared error of a matrix on this input.

    Parameters
    ----------
    tensor : Tensor
    columns : range, optional
        Only these rows of C, so that a wide input can be captured in blocks; by default all.
    """

    BATCH = 2048
    """Rows that are multiplied at a time: adding a product to C costs as much as one of 1000 rows."""

    def __init__(self, tensor: Tensor, columns: range | None = None):
        self.tensor, self.tokens = tensor, 0
        self._columns = slice(0, tensor.width) if columns is None else slice(columns.start, columns.stop)
        self._sum: NDArray[np.float32] = np.zeros((self._columns.stop - self._columns.start, tensor.width), np.float32)
        self._waiting: list[NDArray[np.float32]] = []

    def __call__(self, view: View) -> None:
        """Add the rows of a forward pass."""
        self._waiting.append(view.values(self.tensor))
        self.tokens += view.tokens
        if sum(map(len, self._waiting)) >= self.BATCH:
            self._add()

    def _add(self) -> None:
        if self._waiting:
            x = np.concatenate(self._waiting)
            self._sum += x[:, self._columns].T @ x
            self._waiting.clear()

    @property
    def mean(self) -> NDArray[np.float32]:
        """C, of shape (columns, width)."""
        self._add()
        return self._sum / np.float32(max(self.tokens, 1))

    @staticmethod
    def nbytes(width: int) -> int:
        """Bytes that a whole one keeps; while it adds rows up it takes as much again."""
        return 4 * width * (width + Covariance.BATCH)


class Rows:
    """The first rows of a tensor, for training on examples.

    Parameters
    ----------
    tensor : Tensor
    limit : int
        Most rows to keep.
    """

    def __init__(self, tensor: Tensor, limit: int):
        self.tensor, self.filled = tensor, 0
        self._rows: NDArray[np.float32] = np.zeros((limit, tensor.width), np.float32)

    def __call__(self, view: View) -> None:
        """Keep rows of a forward pass while there is room."""
        some = min(view.tokens, len(self._rows) - self.filled)
        self._rows[self.filled :][:some] = view.values(self.tensor)[:some]
        self.filled += some

    @property
    def rows(self) -> NDArray[np.float32]:
        """Return the kept rows, of shape (rows, width)."""
        return self._rows[: self.filled]


def capture(session: Session, ids: Sequence[int], hooks: Mapping[Op, Sequence[Hook]], *, role: int = DECODE,
            progress: OnStageProgress | None = None) -> None:
    """Run a text in windows as long as the context, each without memory of the one before, and call the hooks on the
    way.

    Parameters
    ----------
    session : Session
        See `open_plain`.
    ids : the text's tokens
    hooks : statistics of this module, or other functions of a `View`, by the operation after which they are called
    role : of all tokens
    progress : called with (done, total, item) in tokens

    Raises
    ------
    RequestError
        There are no tokens.
    """
    if not len(ids):
        raise RequestError("The text has no token to take statistics of.")
    hooked = HookedRunner(session, hooks, role, whole=False)
    window, step = session.plan.request.ctx, session.plan.request.tokens
    for start in range(0, len(ids), window):
        sequence = hooked.new_sequence()
        try:
            for first in range(start, min(start + window, len(ids)), step):
                part = ids[first : min(first + step, start + window)]
                hooked.forward([Segment(sequence, part)])
                if progress:
                    progress(first + len(part), len(ids), "tokens")
        finally:
            hooked.release(sequence)


def in_groups(items: Sequence[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Split items, such as layers, into runs that take at most `limit` bytes together, one item at least."""
    group: list[T] = []
    taken = 0
    for item in items:
        if group and taken + nbytes(item) > limit:
            yield group
            group, taken = [], 0
        group.append(item)
        taken += nbytes(item)
    if group:
        yield group
