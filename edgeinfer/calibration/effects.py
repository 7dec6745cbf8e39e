"""Effects of errors of single matrices on a model's predictions, by which bits are shared out between them.

A rounding error is close to noise in a matrix's output, and the divergence that it causes is close to linear in
the noise's square (arXiv 2411.17525). So noise of a known share of the output's square is put there, for one matrix at
a time, and the predictions of a short text are compared with the model's own: no weight is rounded, and no gradient is
needed. With fables-5m-silu the effects are within 30 % of those of matrices rounded to 3.5 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import (
    Embed,
    ExpertsGated,
    GatedLinear,
    Linear,
    LinearPart,
    MatMul,
    Op,
    Tensor,
    cut_before,
    parameters,
)
from edgeinfer.kernels import reference, routes
from edgeinfer.quant import TILE_ROWS, layouts, one_thread
from edgeinfer.runner import PROMPT, Segment

from ..base.progress import OnStageProgress
from ..runtime import Session
from .hooks import View
from .inputs import UNROUNDED

Floats = NDArray[np.float32]
LEAST_TOKENS, MOST_TOKENS = 256, 8192
"""Fewest and most tokens that are run for each matrix, if the text has them."""
WORK = 1 << 31
"""Tokens times weights of the model, between them: passes of a small model cost little, and its choices are close."""
SHARE = 0.01
"""Square of the noise over that of the output."""
MEASURED = [1, LEAST_TOKENS, MOST_TOKENS, WORK, SHARE]
"""Settings that effects depend on: those in the cache of other ones are not taken. The first element counts other
changes of the method."""
ROUTE_WORDS = routes.ROUTE_BYTES // 4


class Effect(NamedTuple):
    """Divergence in nats that errors of a weight cause, by the square of their share."""

    output: float
    """Errors of its outputs as a matrix."""
    rows: float = 0.0
    """Errors of its rows, where tokens look them up."""


def measure_effects(session: Session, ids: Sequence[int], progress: OnStageProgress | None = None
                    ) -> dict[str, Effect]:
    """Return the effects of the matrices of a model, and of its embedding, by their names.

    Parameters
    ----------
    session : Session
        With weights in floats, and logits for as many tokens as a forward pass has (`open_plain`).
    ids : tokens of a text; pieces of it that are spread over it are run, `LEAST_TOKENS` or more in all
    progress : called with (done, total, item) in matrices
    """
    most = min(max(WORK // sum(map(parameters, session.graph.weights)), LEAST_TOKENS), MOST_TOKENS)
    step = max(min(int(session.plan.request.tokens), most // 2), 2)
    firsts = np.linspace(0, max(len(ids) - step, 0), max(1, min(most, len(ids)) // step), dtype=int)
    parts = [ids[first : first + step] for first in firsts]
    ops = [op for op in session.graph.ops if isinstance(op, Embed)
           or (isinstance(op, MatMul) and op.weight.kind not in UNROUNDED)]
    sums = dict.fromkeys(ops, 0.0)
    for number, part in enumerate(parts):
        run = _Run(session, part)
        for done, op in enumerate(ops):
            sums[op] += run.divergence(op, np.random.default_rng(number)) * len(part)
            if progress:
                progress(number * len(ops) + done + 1, len(parts) * len(ops), op.label)
    found: dict[str, Effect] = {}
    for op, total in sums.items():
        effect = total / sum(map(len, parts)) / SHARE
        assert isinstance(op, Embed | MatMul)
        name = op.table.name if isinstance(op, Embed) else op.weight.name
        before = found.get(name, Effect(0.0))
        found[name] = before._replace(rows=effect) if isinstance(op, Embed) else \
            before._replace(output=before.output + effect)
    return found


class _Run:
    """Some tokens on their way through the model, layer by layer, again and again."""

    def __init__(self, session: Session, ids: Sequence[int]):
        self._session, self._ids = session, ids
        self._instructions = session.program.instructions
        self._view = View(session, len(ids))
        self._start, self._kept = 0, np.zeros(0, np.float32)
        self._rows: Tensor | None = None
        self._own = _log_softmax(self._through(0, (len(self._instructions), None)))

    def divergence(self, op: Op, random: np.random.Generator) -> float:
        """Return the mean divergence of the predictions with noise in an operation's output."""
        self._begin_layer(op)
        at = [i for i, one in enumerate(self._instructions) if one.op is op]
        before: list[Floats] = []

        def remember() -> None:
            adds = op.over is not None and not isinstance(op, LinearPart)  # a part overwrites its columns
            before.append(self._view.floats(op.over).copy() if op.over and adds else np.zeros((), np.float32))

        def noise() -> None:
            _add_noise(self._session, self._view, op, before[0], random)

        logits = self._through(self._start, (at[0], remember), (at[-1] + 1, noise), (len(self._instructions), None))
        other = _log_softmax(logits)
        return float(np.einsum("tv,tv->t", np.exp(self._own), self._own - other).mean())

    def _begin_layer(self, op: Op) -> None:
        """Keep the rows that go into the layer of an operation, if more than these does not."""
        graph = self._session.graph
        try:
            first, rows = cut_before(graph, graph.config.num_hidden_layers - 1 if op.layer is None else op.layer)
        except UnsupportedModelError:
            return
        start = next(i for i, one in enumerate(self._instructions) if one.op is graph.ops[first])
        if isinstance(op, Embed) or rows is None or start <= self._start:
            return
        self._through(self._start, (start, None))
        self._kept, self._start, self._rows = self._view.floats(rows).copy(), start, rows

    def _through(self, start: int, *stops: tuple[int, Callable[[], None] | None]) -> Floats:
        """Run the instructions from one on, to each stop in turn, where something may be called; gives the logits."""
        session = self._session
        sequence = session.new_sequence()
        try:
            session.reserve(sequence, len(self._ids))
            segment = Segment(sequence, self._ids, range(len(self._ids)), PROMPT)
            if self._rows is not None:
                self._view.floats(self._rows)[:] = self._kept
            logits: Floats = np.zeros((0, 0), np.float32)
            for stop, call in stops:
                logits, start = session.forward_range(segment, start, stop), stop
                if call:
                    call()
            return np.array(logits)
        finally:
            session.truncate(sequence, 0)
            session.release(sequence)


def _add_noise(session: Session, view: View, op: Op, before: Floats, random: np.random.Generator) -> None:
    """Add noise to an operation's output: for a gate and its factor before the activation."""
    out = view.floats(op.out)
    if isinstance(op, GatedLinear | ExpertsGated):
        for rows, weights, biases in _gated_parts(session, view, op):
            out[rows, :] = _noisy_gates(op, view.floats(op.x)[rows], weights, biases, out.shape[1], random)
        return
    if isinstance(op, LinearPart):  # the other columns are those of other parts, or not written yet
        out = out[:, op.first : op.first + op.weight.shape[0]]
    own = out - before
    noise = random.standard_normal(out.shape, np.float32)
    if isinstance(op, Linear):
        noise *= _sizes(_values(session, op))[: out.shape[1]]
    out += noise * np.sqrt(np.float32(SHARE) * np.square(own).mean())


def _sizes(weights: Floats) -> Floats:
    """Return the sizes of rows relative to all: errors of small rows, as those of v below q and k, are small."""
    norms = np.linalg.norm(weights, axis=1)
    return np.asarray(norms / max(float(np.sqrt(np.square(norms).mean())), 1e-30), np.float32)


def _gated_parts(session: Session, view: View, op: GatedLinear | ExpertsGated
                 ) -> Iterator[tuple[slice, Floats, Floats]]:
    """Yield the rows of an input that share a matrix, the matrix, and the bias that is added to its products."""
    weights = _values(session, op)
    biases = np.zeros(len(weights), np.float32)
    if op.bias:
        biases = np.concatenate(list(session.bundle.stored(op.bias.name))).view("<f4")
    if isinstance(op, GatedLinear):
        yield slice(0, view.tokens), weights, biases
        return
    entries = len(view.floats(op.x))
    experts = view.words(op.listed, ROUTE_WORDS * entries)[routes.ROUTE_EXPERT // 4 :: ROUTE_WORDS]
    bounds = np.searchsorted(experts, np.arange(op.experts + 1))
    for number, (a, b) in enumerate(pairwise(bounds)):
        if a < b:
            yield (slice(a, b), weights.reshape(op.experts, -1, weights.shape[1])[number],
                   biases.reshape(op.experts, -1)[number])


def _noisy_gates(op: GatedLinear | ExpertsGated, x: Floats, weights: Floats, biases: Floats, width: int,
                 random: np.random.Generator) -> Floats:
    """Return act(x G^T + b + noise) * (x U^T + c + noise), of tiles of gate and up that alternate."""
    with one_thread():
        own = x[:, : weights.shape[1]] @ weights.T
    noise = random.standard_normal(own.shape, np.float32) * _sizes(weights)
    own += noise * np.sqrt(np.float32(SHARE) * np.square(own).mean()) + biases  # which are not rounded
    tiles = own.reshape(len(x), -1, 2, TILE_ROWS)
    gate, up = (tiles[:, :, i].reshape(len(x), -1) for i in (0, 1))
    nothing = np.zeros((len(x), 0)), np.zeros((gate.shape[1], 0))  # the products are where biases would be
    values, _ = reference.gated_values(nothing[0], nothing[1], nothing[1], op.activation, gate.astype(np.float64),
                                       up.astype(np.float64), limit=op.limit)
    return values[:, :width].astype(np.float32)


def _values(session: Session, op: MatMul) -> Floats:
    """Return a matrix as the bundle has it."""
    stored = session.graph.types[op.weight.name]
    data = np.concatenate(list(session.bundle.stored(op.weight.name)))
    shape = op.weight.shape[0], op.weight.shape[-1]
    return np.asarray(layouts.unpack_tile16(data, stored.dtype, 0, shape), np.float32)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)
