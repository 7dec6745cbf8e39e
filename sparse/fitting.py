"""Fit a predictor to a model: factors, rank, thresholds for several lambdas, and the lambda that a divergence allows.

A Lagrange multiplier, lambda, trades quality for bytes: it is the harm that justifies computing one neuron for one
token. Thresholds of all neurons of all layers follow from it, so that a search for the divergence requested is a search
on a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.progress import OnProgress
from edgeinfer.bundle import PREDICTOR_TYPE, Bundle, Predictor
from edgeinfer.calibration.hooks import Hook
from edgeinfer.calibration.statistics import Covariance, Rows, capture, in_groups
from edgeinfer.errors import UsageError
from edgeinfer.graph import Op
from edgeinfer.runtime import Session

from .ffn import Ffn, Parts, biases, normed, parts
from .predictors import Floats, low_rank, pack_matrix, pack_signs, scorer, thresholds
from .refine import refine

LAMBDAS = 10.0 ** np.arange(-2.5, -6.1, -0.25)
"""Lagrange multipliers, the one that skips most neurons first; the harm of all neurons of a token is 1 on average."""
USUAL_LAMBDA = 1e-4
"""Lambda at which ranks are compared."""
RANK_STEP = 2 * PREDICTOR_TYPE.group_size
"""Columns of the outer matrix are stored in pairs of groups."""
SAMPLE_TOKENS, TRAINED_TOKENS = 4096, 8192
"""Rows kept of each layer for thresholds, and of low-rank predictors before these for training."""
COMPARED_TOKENS, COMPARED_NEURONS = 1024, 1024
"""Numbers of tokens that compare ranks, and, about, of a layer's neurons."""
MEMORY_BYTES = 3 << 30
"""Most that captured rows and covariances take at a time; layers are captured in groups."""
Hooks = Mapping[Op, Sequence[Hook]]


@dataclass(frozen=True)
class Fitted:
    """A predictor with thresholds for each of `LAMBDAS`."""

    predictor: Predictor
    choices: tuple[NDArray[np.float32], ...]
    """Thresholds by layer: (lambdas, neurons); (lambdas, 1) for kind ``threshold``; (lambdas, 0) if it stays dense."""

    def at(self, i: int) -> Predictor:
        """Return the predictor with the thresholds of lambda i."""
        return replace(self.predictor, thresholds=tuple(np.ascontiguousarray(choice[i]) for choice in self.choices))


def fit(session: Session, bundle: Bundle, networks: Sequence[Ffn], ids: Sequence[int], kind: str, *,
        rank: int | None = None, epochs: int = 0, on_progress: OnProgress = lambda *_: None,
        along: Hooks | None = None) -> Fitted:
    """Fit a predictor to the activations of a text.

    Parameters
    ----------
    session : of `open_plain`
    ids : the text's tokens
    kind : {'sign', 'lowrank', 'threshold'}
    rank : int, optional
        Of a low-rank predictor; by default the one that costs least, its own bytes and those of the neurons together.
    epochs : of training a low-rank predictor, where the text has tokens enough
    on_progress : called with (stage, done, total, item)
    along : other statistics to take of the whole text
    """
    check_rank(rank, kind, bundle.config.hidden_size)
    check_epochs(epochs, kind)
    factors = _factors(session, bundle, networks, ids, rank, on_progress, along or {}) if kind == "lowrank" else []
    if along and not factors:
        capture(session, ids, along, progress=lambda done, total, _: on_progress("capture", done, total, "activity"))
    made: dict[int, tuple[Predictor, NDArray[np.float32]]] = {}
    rows = SAMPLE_TOKENS + (TRAINED_TOKENS if factors and epochs else 0)
    for layer in _captured(session, bundle, networks, ids, rows, on_progress):
        gate, own = layer.weights.gate, factors[len(made)] if factors else None
        if own and epochs and len(layer.x) >= 2 * SAMPLE_TOKENS:
            layer, own = _refined(layer, own, epochs)
        one = _one(kind, gate, own)
        scores = scorer(one, 0, gate, layer.ffn.activation, biases(bundle, layer.ffn)[0])(layer.x)
        harm = harm_of(layer.f, layer.weights.down)
        made[layer.ffn.layer] = one, thresholds(scores, harm, LAMBDAS, kind == "threshold")
        on_progress("thresholds", len(made), len(networks), f"layer {layer.ffn.layer}")
    return _by_layer(bundle.config.num_hidden_layers, kind, made)


def _refined(layer: _Layer, closed: tuple[Floats, Floats], epochs: int) -> tuple[_Layer, tuple[Floats, Floats]]:
    """Train a layer's factors on its first rows; return its other rows, and the factors that cost less on these."""
    harm = harm_of(layer.f, layer.weights.down)[:-SAMPLE_TOKENS]
    trained = refine(*closed, layer.x[:-SAMPLE_TOKENS], harm, USUAL_LAMBDA, epochs)
    rest = layer._replace(x=layer.x[-SAMPLE_TOKENS:], f=layer.f[-SAMPLE_TOKENS:])
    return rest, min((trained, closed), key=lambda factors: _cost(factors, factors[0].shape[1], rest))


def _by_layer(layers: int, kind: str, made: dict[int, tuple[Predictor, NDArray[np.float32]]]) -> Fitted:
    """Put the predictors of single layers together; layers in tiles have empty arrays."""
    one = next(iter(made.values()))[0]
    arrays: dict[str, Any] = {
        name: tuple(getattr(made[i][0], name)[0] if i in made else np.zeros(0, np.uint8) for i in range(layers))
        for name in ("signs", "inner", "outer") if getattr(one, name)}
    none = np.zeros((len(LAMBDAS), 0), np.float32)
    return Fitted(Predictor(kind, one.rank, **arrays), tuple(made[i][1] if i in made else none for i in range(layers)))


def least_bytes(kind: str, rank: int | None, ffn: Ffn) -> int:
    """Return the bytes of the smallest predictor of a kind for a layer."""
    rank, hidden = rank or min(RANK_STEP, ffn.x.width), ffn.x.width
    matrices = {"sign": ffn.neurons * hidden // 8, "threshold": 0,
                "lowrank": PREDICTOR_TYPE.nbytes((rank, hidden)) + PREDICTOR_TYPE.nbytes((ffn.neurons, rank))}
    return matrices[kind] + 4 * ffn.neurons


def check_epochs(epochs: int, kind: str) -> None:
    """Refuse to train a predictor without trainable parts."""
    if epochs and kind != "lowrank":
        raise UsageError(f"epochs is {epochs}, but a {kind} predictor is not trained; leave it out, or take lowrank.")
    if not 0 <= epochs <= 100:
        raise UsageError(f"epochs is {epochs}; it must be from 0 to 100.")


def check_rank(rank: int | None, kind: str, hidden: int) -> None:
    """Refuse a rank that no predictor of this kind has."""
    if rank is not None and kind != "lowrank":
        raise UsageError(f"rank is {rank}, but a {kind} predictor has none; leave it out, or take lowrank.")
    if rank is not None and not 1 <= rank <= hidden:
        raise UsageError(f"rank is {rank}; it must be from 1 to hidden_size, {hidden}.")


def choose(fitted: Fitted, divergence: Callable[[Predictor], float], target: float) -> int:
    """Return the index of the highest lambda whose divergence is within the target; the lowest if none is."""
    low, high = 0, len(LAMBDAS)  # from `high` on all are known to be within, below `low` none
    while low < high:
        middle = (low + high) // 2
        if divergence(fitted.at(middle)) <= target:
            high = middle
        else:
            low = middle + 1
    return min(high, len(LAMBDAS) - 1)


def harm_of(f: Floats, down: Floats) -> Floats:
    """Return the effect of leaving out each neuron on the layer's output, over the mean of its sum: (|f| |d|)^2.

    Rows f are those that down multiplies (`normed`).
    """
    harm = (f * np.linalg.norm(down, axis=1)) ** 2
    return np.asarray(harm / max(float(harm.sum(axis=1).mean()), 1e-30), np.float32)


def _one(kind: str, gate: Floats, factors: tuple[Floats, Floats] | None) -> Predictor:
    """The predictor of a single layer, without thresholds."""
    if kind == "sign":
        return Predictor(kind, 0, signs=(pack_signs(gate),))
    if factors is None:
        return Predictor(kind, 0)
    outer, inner = factors
    return Predictor(kind, len(inner), inner=(pack_matrix(inner),), outer=(pack_matrix(outer),))


class _Layer(NamedTuple):
    """Captured activations of a layer."""

    ffn: Ffn
    weights: Parts
    x: Floats
    f: Floats
    """Rows that down multiplies."""
    covariance: Floats
    """Rows of x; empty if they were not requested."""


def _captured(session: Session, bundle: Bundle, networks: Sequence[Ffn], ids: Sequence[int], tokens: int,
              on_progress: OnProgress, along: Hooks | None = None) -> Iterator[_Layer]:
    """Yield the first rows of x and f of each layer; with `along` also the covariance of x over the whole text."""
    tokens, whole = min(tokens, len(ids)), along is not None

    def nbytes(ffn: Ffn) -> int:
        rows = 4 * tokens * (ffn.x.width + ffn.neurons)
        return rows + (Covariance.nbytes(ffn.x.width) if whole else 0)

    left = dict(along or {})
    for group in (groups := list(in_groups(networks, nbytes, MEMORY_BYTES))):
        kept = {ffn.op: [Rows(ffn.x, tokens), Rows(ffn.f, tokens)] for ffn in group}
        squares = {ffn.op: [Covariance(ffn.x)] if whole else [] for ffn in group}
        where = f"layers {group[0].layer} to {group[-1].layer}"
        hooks: dict[Op, list[Hook]] = {ffn.op: [*kept[ffn.op], *squares[ffn.op], *left.pop(ffn.op, ())]
                                         for ffn in group}
        if group is groups[-1]:
            hooks |= {op: list(more) for op, more in left.items()}
        capture(session, ids if whole else _spread(ids, tokens, session.plan.request.ctx), hooks,
                progress=lambda done, total, _, where=where: on_progress("capture", done, total, where))  # type: ignore[misc]
        for ffn in group:
            x, f = kept.pop(ffn.op)
            mean = squares[ffn.op].pop().mean if whole else np.zeros((0, 0), np.float32)
            yield _Layer(ffn, parts(bundle, ffn), x.rows, normed(bundle, ffn, f.rows), mean)


def _spread(ids: Sequence[int], tokens: int, window: int) -> list[int]:
    """Some windows of a text, as far apart as they can be."""
    windows = [ids[first : first + window] for first in range(0, len(ids), window)]
    n = -(-tokens // window)
    some = [windows[i * len(windows) // n] for i in range(n)] if n < len(windows) else windows
    return [token for one in some for token in one][:tokens]


def _factors(session: Session, bundle: Bundle, networks: Sequence[Ffn], ids: Sequence[int], rank: int | None,
             on_progress: OnProgress, along: Hooks) -> list[tuple[Floats, Floats]]:
    """Outer and inner matrix of each layer, of the rank requested, or the one that costs least over all layers."""
    hidden = bundle.config.hidden_size
    most = min(hidden, max(RANK_STEP, hidden // 4 // RANK_STEP * RANK_STEP)) if rank is None else rank
    ranks = list(range(min(RANK_STEP, most), most + 1, RANK_STEP))
    costs = np.zeros(len(ranks))
    found: list[tuple[Floats, Floats]] = []
    for layer in _captured(session, bundle, networks, ids, COMPARED_TOKENS, on_progress, along):
        found.append(low_rank(layer.weights.gate, layer.covariance, most))
        for i, tried in enumerate(ranks if rank is None else []):
            costs[i] += _cost(found[-1], tried, layer)
        on_progress("factors", len(found), len(networks), f"layer {layer.ffn.layer}")
    best = most if rank is not None else ranks[int(costs.argmin())]
    return [(outer[:, :best], inner[:best]) for outer, inner in found]


def _cost(factors: tuple[Floats, Floats], rank: int, layer: _Layer) -> float:
    """Cost in neurons per token at the usual lambda, with the predictor's bytes and the harm converted to neurons."""
    outer, inner = factors
    step = max(1, len(outer) // COMPARED_NEURONS)  # they are in order of heat: every n-th are like all
    gate = layer.weights.gate[::step]
    one = _one("lowrank", gate, (outer[::step, :rank], inner[:rank]))
    scores = scorer(one, 0, gate, layer.ffn.activation)(layer.x)
    harm = harm_of(layer.f, layer.weights.down)[:, ::step]
    chosen = scores > thresholds(scores, harm, np.array([USUAL_LAMBDA]))[0]
    neuron = layer.ffn.parts * PREDICTOR_TYPE.bytes_of(gate.shape[1]) / 2  # about, of a model in 4 bits
    computed = len(outer) / len(gate) * (np.count_nonzero(chosen) + harm[~chosen].sum() / USUAL_LAMBDA) / len(layer.x)
    return float(computed + least_bytes("lowrank", rank, layer.ffn) / neuron)
