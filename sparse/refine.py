"""Training of a low-rank predictor's matrices, from the closed form on: NumPy, Adam, the same bits for the same seed.

The closed form keeps the largest part of the gates; a predictor only has to tell which neurons are worth computing. So
each neuron's score is trained as the logit of that, once for each token (logistic loss), with the inner product rounded
to int8 as in a run; a neuron that is missed weighs by the root of the harm it does.
"""

from __future__ import annotations

import numpy as np

from .predictors import Floats, rounded

BATCH, SEED = 256, 1
STEP = 0.04
"""First step size, as a share of a matrix's mean magnitude; it falls to 0 along a cosine."""
HEAVIEST = 6.0
"""Maximum weight of a missed neuron; one computed in vain weighs 1."""
STEEPNESS = 3.0
"""Steepness of the logit, for a score one deviation from its threshold."""
DECAY = (0.9, 0.99)


def refine(outer: Floats, inner: Floats, x: Floats, harm: Floats, lambda_: float, epochs: int) -> tuple[Floats, Floats]:
    """Return the matrices after training.

    Parameters
    ----------
    outer, inner : of `low_rank`
    x : of shape (tokens, hidden_size)
    harm : of shape (tokens, neurons)
        As for `thresholds`.
    lambda_ : float
        The harm that computing one neuron for one token is worth.
    epochs : int
        Passes over the tokens.
    """
    rng, tokens = np.random.default_rng(SEED), len(x)
    worth = harm > lambda_
    some = np.sort(rounded(x[:1024] @ inner.T) @ outer.T, axis=0)
    middle = ((1 - worth.mean(axis=0)) * (len(some) - 1)).astype(np.int64)
    thresholds = np.take_along_axis(some, middle[None], 0)[0]
    slope = np.float32(STEEPNESS) / (some.std(axis=0) + np.float32(1e-6))
    weights = [outer.copy(), inner.copy(), thresholds]
    sizes = [float(np.abs(outer).mean()), float(np.abs(inner).mean()), float(1 / slope.mean())]
    optimiser = _Adam(weights, sizes, epochs * -(-tokens // BATCH))
    for _ in range(epochs):
        order = rng.permutation(tokens)
        for first in range(0, tokens, BATCH):
            at = order[first : first + BATCH]
            outer, inner, thresholds = weights
            rows, wanted = x[at], worth[at]
            low = rounded(rows @ inner.T)
            logits = (low @ outer.T - thresholds) * slope
            error = 1 / (1 + np.exp(-np.clip(logits, -30, 30))) - wanted
            error *= np.where(wanted, np.minimum(np.sqrt(harm[at] / np.float32(lambda_)), np.float32(HEAVIEST)), 1)
            error *= slope / np.float32(len(at))
            optimiser.step([error.T @ low, (error @ outer).T @ rows, -error.sum(axis=0)])
    return weights[0], weights[1]


class _Adam:
    """Adam (arXiv 1412.6980) with steps relative to the parameters, falling to 0."""

    def __init__(self, weights: list[Floats], sizes: list[float], steps: int):
        self._weights, self._sizes, self._steps, self._done = weights, sizes, steps, 0
        self._means = [np.zeros_like(one) for one in weights]
        self._squares = [np.zeros_like(one) for one in weights]

    def step(self, gradients: list[Floats]) -> None:
        """Change the weights in place."""
        rate = STEP * 0.5 * (1 + np.cos(np.pi * self._done / self._steps))
        self._done += 1
        fast, slow = (1 - decay**self._done for decay in DECAY)
        for weight, size, mean, square, gradient in zip(self._weights, self._sizes, self._means, self._squares,
                                                        gradients, strict=True):
            mean += (1 - DECAY[0]) * (gradient - mean)
            square += (1 - DECAY[1]) * (gradient * gradient - square)
            weight -= np.float32(rate * size / fast) * mean / (np.sqrt(square / np.float32(slow)) + np.float32(1e-12))
