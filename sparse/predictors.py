"""Predictors of active neurons, in NumPy: their construction from a layer's weights, and their evaluation.

* ``sign``: how many more positions of x and the gate row agree in their sign than differ (SparseInfer,
                                                                                           arXiv 2411.12692).
* ``lowrank``: the best approximation of the gate by a product of rank r, for inputs with the covariance C: of all G' of
  that rank the one with the least mean of |(G - G') x|^2. With C = L L' and the largest eigenvectors V of
  (G L)' (G L) it is (G L V) (V' L^-1); no gradient, no labels.
* ``threshold``: the gate is computed as always, and its activation decides (CATS, arXiv 2404.08763).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import PREDICTOR_TYPE, Predictor
from edgeinfer.kernels import reference
from edgeinfer.quant import layouts, quantise

Floats = NDArray[np.float32]
Scores = Callable[[Floats], Floats]
"""Function from rows of x (tokens, hidden_size) to scores (tokens, neurons)."""
GROUP = PREDICTOR_TYPE.group_size
ALWAYS = np.float32(-3e38)
"""The threshold of a neuron that is computed for every token."""
COLUMNS = 16
"""Neurons whose thresholds are chosen at a time: few enough to stay in cache."""
RIDGE = 1e-6
"""Added to the covariance, as a share of its mean diagonal: directions that the text never took."""


def pack_signs(gate: Floats) -> NDArray[np.uint64]:
    """Return which weights are negative, 64 columns a word, of shape (neurons, words)."""
    neurons, hidden = gate.shape
    padded = np.zeros((neurons, -(-hidden // 64) * 64), bool)
    padded[:, :hidden] = gate < 0
    return np.packbits(padded, axis=1, bitorder="little").view("<u8")


def low_rank(gate: Floats, covariance: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return outer (neurons, rank) and inner (rank, hidden_size), the most important directions first.

    Those of a smaller rank are their first columns and rows.
    """
    c = covariance.astype(np.float64)
    c[np.diag_indices(len(c))] += RIDGE * max(np.trace(c) / len(c), 1e-30)
    root = np.linalg.cholesky(c)
    weighted = gate @ root.astype(np.float32)  # eigenvectors in float64 take seven times as long
    _, vectors = np.linalg.eigh(weighted.T @ weighted)
    vectors = vectors[:, : -rank - 1 : -1]
    inner = np.linalg.solve(root.T, vectors).T  # of even size: a row of inner x has a mean square of 1
    return (weighted @ vectors).astype(np.float32), inner.astype(np.float32)


def pack_matrix(weights: Floats) -> NDArray[np.uint8]:
    """Return the stored bytes of a predictor's matrix."""
    codes, scales, _ = quantise.quantise(weights, PREDICTOR_TYPE.dtype, GROUP, "the predictor")
    return layouts.pack_tile16(codes, PREDICTOR_TYPE.dtype, GROUP, scales)


def unpack_matrix(data: NDArray[np.uint8], shape: tuple[int, int]) -> Floats:
    """Return the weights that stored bytes stand for."""
    return layouts.unpack_tile16(np.asarray(data), PREDICTOR_TYPE.dtype, GROUP, shape)


def scorer(predictor: Predictor, layer: int, gate: Floats, activation: str, bias: Floats | float = 0.0) -> Scores:
    """Return the function of a layer's scores, with the stored bytes of the predictor and the steps of the kernels.

    The gates' biases shift a threshold's input; other kinds have thresholds of each neuron, which know of them.
    """
    neurons, hidden = gate.shape
    if predictor.kind == "sign":
        bits = np.unpackbits(predictor.signs[layer].view(np.uint8), axis=1, bitorder="little")[:, :hidden]
        ones = (1 - 2 * bits.astype(np.float32)).T
        return lambda x: np.where(x < 0, np.float32(-1), np.float32(1)) @ ones
    if predictor.kind == "lowrank":
        inner = unpack_matrix(predictor.inner[layer], (predictor.rank, hidden)).T
        outer = unpack_matrix(predictor.outer[layer], (neurons, predictor.rank)).T
        return lambda x: rounded(x @ inner) @ outer
    act = reference.ACTIVATION_FUNCTIONS[activation]
    return lambda x: np.abs(act((x @ gate.T + bias).astype(np.float64))).astype(np.float32)


def rounded(x: Floats, group: int = GROUP) -> Floats:
    """Return rows as a product of int8 sees them, in groups of columns."""
    padded = np.zeros((len(x), -(-x.shape[1] // group) * group), np.float32)
    padded[:, : x.shape[1]] = x
    codes, scales = reference.quantise_rows(padded, group)
    return (np.rint(codes) * np.repeat(scales, group, axis=1))[:, : x.shape[1]].astype(np.float32)


def thresholds(scores: Floats, harm: Floats, lambdas: NDArray[Any], one: bool = False) -> Floats:
    """Choose, for each lambda, which scores are too low to be worth a neuron.

    Parameters
    ----------
    scores : of shape (tokens, neurons)
    harm : of shape (tokens, neurons)
        Effect of leaving the neuron out on the layer's output: (|f| |d|)^2, over the mean of its sum over neurons.
    lambdas : of shape (n,)
        The harm that computing one neuron for one token is worth: a threshold is where the number of neurons left out
        less their harm / lambda is largest, neuron by neuron.
    one : bool
        Whether all neurons have one threshold.

    Returns
    -------
    float32 array of shape (n, neurons), or (n, 1)
        A neuron is computed where its score is above.
    """
    if one:
        scores, harm = scores.reshape(-1, 1), harm.reshape(-1, 1)
    chosen = np.empty((len(lambdas), scores.shape[1]), np.float32)
    left_out = np.arange(1, len(scores) + 1, dtype=np.float32)

    def choose(first: int) -> None:
        part = slice(first, first + COLUMNS)
        columns = np.ascontiguousarray(scores[:, part].T)
        order = np.argsort(columns, axis=1)
        ordered = np.take_along_axis(columns, order, 1)
        added = np.cumsum(np.take_along_axis(harm[:, part].T, order, 1), axis=1, dtype=np.float64).astype(np.float32)
        added[:, :-1][ordered[:, 1:] == ordered[:, :-1]] = np.inf  # equal scores go together
        for i, lambda_ in enumerate(lambdas):
            gain = left_out - added / np.float32(lambda_)
            best = gain.argmax(axis=1)[:, None]
            worth = np.take_along_axis(gain, best, 1)[:, 0] > 0
            chosen[i, part] = np.where(worth, np.take_along_axis(ordered, best, 1)[:, 0], ALWAYS)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy sorts and adds up without the interpreter's lock
        list(pool.map(choose, range(0, scores.shape[1], COLUMNS)))
    return chosen
