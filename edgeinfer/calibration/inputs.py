"""Statistics of each matrix's input over a text, by which its weights are rounded.

The text goes through the model layer by layer: all of it through a group of layers, whose sums fit in memory, before
any of it goes through the next. Between groups the residual rows of all tokens are kept aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from edgeinfer.errors import RequestError, UnsupportedModelError
from edgeinfer.graph import ExpertsDown, ExpertsGated, Graph, HeadLinear, MatMul, Tensor, cut_before
from edgeinfer.kernels import routes
from edgeinfer.quant import InputStatistics
from edgeinfer.runner import PROMPT, Segment

from ..base.progress import OnStageProgress
from ..runtime import Session
from .hooks import View
from .statistics import in_groups
from .sums import BLOCK, EXPERT_ROWS, ROWS, Floats, Sums

MEMORY_BYTES = 900 << 20
"""Most that the sums of a group of layers and the rows between groups take."""
WIDEST = 14336
"""Columns above which a matrix gets no covariance, whose sums would take a gigabyte by themselves."""
PRIOR = 1
"""Inputs of an expert count as much as its own tokens and, of all tokens of the layer, a number of its columns / this
(`blended`). With 4, experts that saw fewer tokens than columns lost up to 24 % more than with plain rounding."""
ROUTE_WORDS = routes.ROUTE_BYTES // 4
"""Words of an entry of the list of (token, expert)."""
UNROUNDED = ("router", "rows")
"""Kinds of weights that are not judged by their inputs: they stay floats, or are not multiplied."""


class MatrixInput(NamedTuple):
    """The input of the matrices of one operation."""

    weights: tuple[str, ...]
    """Names of the weights that multiply it."""
    op: MatMul
    """The first operation that does."""
    pieces: int
    """Experts or heads, each of which multiplies rows of its own."""
    width: int
    whole: bool = True
    """True if it gets a covariance."""

    @property
    def batch(self) -> int:
        """Rows multiplied at a time."""
        return ROWS if self.pieces == 1 else EXPERT_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes of its sums; those of experts with the sums of all of them."""
        return (self.pieces + (self.pieces > 1)) * Sums.nbytes(self.width, self.whole, self.batch)


def matrix_inputs(graph: Graph, covariances: bool = True) -> list[MatrixInput]:
    """Return the inputs of a graph's matrices in the order in which they are computed, each once; none gets a
    covariance without `covariances`."""
    found: dict[tuple[str, int], MatrixInput] = {}
    for op in graph.ops:
        if not isinstance(op, MatMul) or op.weight.kind in UNROUNDED:
            continue
        pieces = op.experts if isinstance(op, ExpertsGated | ExpertsDown) else \
            op.heads if isinstance(op, HeadLinear) else 1
        key = op.x.name, pieces
        one = found.get(key) or MatrixInput((), op, pieces, op.weight.shape[-1],
                                              covariances and op.weight.shape[-1] <= WIDEST)
        found[key] = one._replace(weights=(*one.weights, op.weight.name))
    return list(found.values())


def stored_bytes(graph: Graph, covariances: bool = True) -> int:
    """Return about how many bytes the statistics of a graph's inputs take on the disk."""
    return sum(one.pieces * (8 * one.width + (2 * one.width * (one.width + BLOCK) if one.whole else 0))
               for one in matrix_inputs(graph, covariances))


OnInput = Callable[[MatrixInput, Sequence[InputStatistics]], None]
"""Gets the statistics of an input, one of each of its pieces, as soon as they are complete."""


def capture_inputs(session: Session, ids: Sequence[int], on_input: OnInput, *, covariances: bool = True,
                   limit: int = MEMORY_BYTES, progress: OnStageProgress | None = None) -> None:
    """Take the statistics of all matrices' inputs over a text, in windows without memory of the one before.

    Parameters
    ----------
    session : Session
        With weights in floats, and logits for as many tokens as a forward pass has (`open_plain`).
    ids : the text's tokens
    on_input : called once for each input
    covariances : whether products of columns are summed too, which takes about as long as the model's run
    limit : most bytes that are held at a time
    progress : called with (done, total, item) in tokens times groups of layers

    Raises
    ------
    RequestError
        There are no tokens, or an input has a value that is NaN or infinite.
    """
    if not len(ids):
        raise RequestError("The text has no token to take statistics of.")
    run = _Run(session, ids)
    kept = 4 * len(ids) * session.model.hidden_size
    groups = list(in_groups(matrix_inputs(session.graph, covariances), lambda one: one.nbytes, max(limit - kept, 0)))
    starts = [run.start(group[0]) for group in groups]
    total, done = len(groups) * len(ids), 0
    for group, start, following in zip(groups, starts, [*starts[1:], None], strict=True):
        sums = [_sums_of(one) for one in group]
        for n in run.through(group, sums, start, following if following != start else None):
            done += n
            if progress:
                progress(done, total, f"{group[0].weights[0]} to {group[-1].weights[0]}")
        for one in group:
            on_input(one, _statistics(one, sums.pop(0)))


def _sums_of(one: MatrixInput) -> list[Sums]:
    """Return the sums of each piece; of several, then those of all together."""
    return [Sums(one.width, one.whole, one.batch) for _ in range(one.pieces + (one.pieces > 1))]


def _statistics(one: MatrixInput, sums: list[Sums]) -> list[InputStatistics]:
    if not all(each.finite for each in sums):
        raise RequestError(f"An input of {one.weights[0]} is NaN or infinite in the text; the model is damaged, or its "
                           "weights do not fit f16: convert without --calibrate.")
    if one.pieces == 1:
        return [sums[0].statistics()]
    together = sums.pop().statistics()
    return [blended(sums.pop(0).statistics(), together) for _ in range(one.pieces)]


def blended(own: InputStatistics, together: InputStatistics) -> InputStatistics:
    """Return an expert's statistics with a prior: those of all tokens of its layer, as if it had seen its columns /
    `PRIOR` tokens of them.
    """
    prior = len(own.mean_square) / PRIOR
    share = np.float32(prior / (own.tokens + prior))

    def mixed(a: Floats | None, b: Floats | None) -> Floats | None:
        return None if a is None or b is None else a + share * (b - a)

    squares = mixed(own.mean_square, together.mean_square)
    assert squares is not None
    return InputStatistics(own.tokens, squares, own.largest if own.tokens else together.largest,
                           mixed(own.covariance, together.covariance))


class Stop(NamedTuple):
    """Stop a forward pass before an instruction, to take rows of these tokens."""

    instruction: int
    take: Callable[[View, slice], None]


class _Run:
    """The text's way through the model."""

    def __init__(self, session: Session, ids: Sequence[int]):
        self._session, self._ids = session, ids
        self._rows: Floats = np.zeros((0, 0), np.float32)
        self._step = max(session.plan.request.tokens, 2)
        self._window = int(session.plan.request.ctx)

    def start(self, first: MatrixInput) -> tuple[int, Tensor | None]:
        """Return the instruction with which the layer of an input begins, and the rows that go into it.

        A model of which more than these rows goes from layer to layer begins with the first one again.
        """
        graph, layer = self._session.graph, first.op.layer
        try:
            op, rows = cut_before(graph, graph.config.num_hidden_layers - 1 if layer is None else layer)
        except UnsupportedModelError:
            return 0, None
        return (self._instruction(graph.ops[op]), rows) if rows else (0, None)

    def _instruction(self, op: object) -> int:
        return next(i for i, one in enumerate(self._session.program.instructions) if one.op is op)

    def through(self, group: list[MatrixInput], sums: list[list[Sums]], start: tuple[int, Tensor | None],
                following: tuple[int, Tensor | None] | None) -> Iterator[int]:
        """Let all tokens go through a group of layers, up to where the next one begins; yields how many have."""
        stops = [Stop(self._instruction(one.op), partial(_add, one=one, sums=own))
                 for one, own in zip(group, sums, strict=True)]
        left = self._rows
        if following and following[1]:
            left = self._rows if len(self._rows) else np.zeros((len(self._ids), following[1].width), np.float32)
            # A group may begin within a layer, whose first inputs the group before it takes after these rows.
            stops.append(Stop(following[0], partial(_keep, rows=following[1], left=left)))
            stops.sort(key=lambda stop: stop.instruction)
        for window in range(0, len(self._ids), self._window):
            ids = self._ids[window : window + self._window]
            sequence = self._session.new_sequence()
            try:
                self._session.reserve(sequence, len(ids))
                for first in range(0, len(ids), self._step):
                    part = ids[first : first + self._step]
                    if len(part) == 1:
                        continue  # a pass of one token has no list of its experts' rows
                    view, here = View(self._session, len(part)), slice(window + first, window + first + len(part))
                    if start[1]:
                        view.floats(start[1])[:] = self._rows[here]
                    segment = Segment(sequence, part, range(len(part)), PROMPT)
                    at = start[0]
                    for stop in stops:
                        self._session.forward_range(segment, at, stop.instruction, first)
                        stop.take(view, here)
                        at = stop.instruction
                    yield len(part)
            finally:
                self._session.truncate(sequence, 0)
                self._session.release(sequence)
        self._rows = left


def _keep(view: View, here: slice, rows: Tensor, left: Floats) -> None:
    """Keep the rows of a forward pass, from which the next group continues."""
    left[here] = view.floats(rows)


def _add(view: View, _: slice, one: MatrixInput, sums: list[Sums]) -> None:
    """Add the rows of a forward pass to the sums that they belong to."""
    op = one.op
    rows = view.floats(op.x)
    if one.pieces == 1:
        sums[0].add(rows[:, : one.width])
        return
    if isinstance(op, HeadLinear):
        apart = rows[:, : one.pieces * one.width].reshape(len(rows), one.pieces, one.width)
        parts = [np.ascontiguousarray(apart[:, i]) for i in range(one.pieces)]
    else:
        assert isinstance(op, ExpertsGated | ExpertsDown)
        experts = view.words(op.listed, ROUTE_WORDS * len(rows))[routes.ROUTE_EXPERT // 4 :: ROUTE_WORDS]
        bounds = np.searchsorted(experts, np.arange(one.pieces + 1))
        parts = [rows[a:b, : one.width] for a, b in pairwise(bounds)]
    for own, part in zip(sums, parts, strict=False):
        own.add(part)
        sums[-1].add(part)
