"""Random MoE models whose routing is that of a stated skew: how often each expert of a layer is chosen.

A logit is as large as its row of the router, and rows are multiplied by factors from 1 on, in random order: the larger
one is, the more often its expert is among the best. The embedding is so large (`APART`) that tokens stay apart; else
attention's average over the context would soon be most of every token, and all would go through the same experts.
Tokens choose independently of each other, so a cache has only the skew to live on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError

TOKENS, MAX_SPREAD = 4096, 64.0
"""Tokens that rates are counted of; largest spread that is tried."""


class Routing:
    """The factors of the rows of routers.

    Parameters
    ----------
    rng : numpy Generator
        For the order of the factors, which differs by layer.
    experts, active : int
    half : float
        Share of a token's choices that the busier half of a layer's experts takes; 0.5 = all are chosen alike.

    Raises
    ------
    UsageError
        No spread of factors gives this share.
    """

    def __init__(self, rng: np.random.Generator, experts: int, active: int, half: float):
        self._rng, self._experts = rng, experts
        self.spread = spread_of(experts, active, half)

    def factors(self) -> NDArray[np.float32]:
        """Factors of the rows of one layer's router."""
        return factors(self._experts, self.spread)[self._rng.permutation(self._experts)]


def factors(experts: int, spread: float) -> NDArray[np.float32]:
    """Factors from 1 to 1 + spread, at equal distances."""
    return (1 + spread * np.linspace(0, 1, experts)).astype(np.float32)


def rates_of(experts: int, active: int, half: float) -> NDArray[np.float64]:
    """Return the share of tokens that go through each expert of a layer, where routing has this skew."""
    return _rates(factors(experts, spread_of(experts, active, half)), active)


def _rates(times: NDArray[np.float32], active: int) -> NDArray[np.float64]:
    z = np.random.default_rng(0).standard_normal((TOKENS, len(times)))
    chosen = np.argpartition(-z * times, active - 1, axis=1)[:, :active]
    rates: NDArray[np.float64] = np.bincount(chosen.reshape(-1), minlength=len(times)) / TOKENS
    return rates


def spread_of(experts: int, active: int, half: float) -> float:
    """Return how far factors go beyond 1 so that the busier half of the experts takes this share of the choices."""
    def share(spread: float) -> float:
        return float(_rates(factors(experts, spread), active)[experts // 2 :].sum()) / active

    if half <= 0.5:
        return 0.0
    low, high = 0.0, MAX_SPREAD
    if share(high) < half:
        raise UsageError(f"The busier half of {experts} experts, of which {active} are chosen, takes at most "
                         f"{share(high):.0%} of the choices of random tokens; lower --routing from {half:g}.")
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < half else (low, middle)
    return low
