"""Cost of a placement: clusters that a token needs and misses, their bytes, the time of reading them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle, Statistics, read_statistics
from edgeinfer.memory_planner import ColdPlan

Floats = NDArray[np.float64]
LONGEST = 1e12
"""Tokens after which a cache that is not full by then never will be: its other clusters are not wanted."""


class Prediction(NamedTuple):
    """Predicted cost of a decoded token, on average over tokens like those of the statistics."""

    wanted: float
    """Clusters with cold neurons that it computes."""
    hit_rate: float
    """Share of them that the cache holds."""
    flash_bytes: float
    """Read from storage."""
    seconds: float


def predict(plan: ColdPlan, statistics: Statistics, seconds_in_memory: float,
            storage_gbs: Callable[[float], float], hit_rate: float | None = None) -> Prediction:
    """Return the cost of a token.

    Neurons count as independent of each other and of the tokens before: then a cache that evicts clusters unused
    for t tokens holds a cluster of rate r with probability 1 - (1 - r)^t, and t follows from the slots (Che et al.,
    Hierarchical Web Caching Systems, 2002). Layers take turns, so a cache of less than one token's clusters has lost
    a layer's when its turn comes again. Neighbouring tokens that share neurons make the rate higher than said. Reads of
    a layer follow its mask and hide behind its resident neurons alone, so time adds up.

    Parameters
    ----------
    plan : ColdPlan
    statistics : Statistics
    seconds_in_memory : float
        Of a token with all neurons in memory.
    storage_gbs : callable
        GB/s of scattered reads of this many bytes, several at a time (`devices.DeviceProfile.storage_random`).
    hit_rate : float, optional
        Of the cache, where it was measured; 0 for an empty one.
    """
    rates = cluster_rates(plan, statistics)
    wanted = float(rates.sum())
    missed = _missed(rates, plan.slots) if hit_rate is None else wanted * (1 - hit_rate)
    nbytes = missed * plan.cluster_bytes
    seconds = seconds_in_memory + (nbytes / storage_gbs(plan.cluster_bytes) / 1e9 if nbytes else 0.0)
    return Prediction(wanted, 1 - missed / wanted if wanted else 1.0, nbytes, seconds)


def cold_reads(bundle: Bundle, plan: ColdPlan) -> float:
    """Return the bytes that a token is expected to read of a bundle's cold neurons."""
    return predict(plan, statistics_of(bundle, plan), 0.0, lambda nbytes: 1.0).flash_bytes


def statistics_of(bundle: Bundle, plan: ColdPlan) -> Statistics:
    """Return those of the bundle; without any each token needs all neurons, for all that is known."""
    return read_statistics(bundle) or Statistics(1, (np.ones(plan.neurons, np.int64),) * len(plan.hot), (), ())


def _missed(rates: Floats, slots: int) -> float:
    if len(rates) <= slots:
        return 0.0
    if slots <= rates.sum():
        return float(rates.sum())
    low, high = 1.0, 2.0
    while _held(rates, high) < slots and high < LONGEST:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _held(rates, middle) < slots else (low, middle)
    return float((rates * (1 - rates) ** low).sum())


def cluster_rates(plan: ColdPlan, statistics: Statistics) -> Floats:
    """Return for each cold cluster of all layers the share of tokens that want it."""
    found = []
    for layer, (fired, hot) in enumerate(zip(statistics.fired, plan.hot, strict=True)):
        silent = np.ones(plan.clusters << plan.shift)
        silent[hot : plan.neurons] -= fired[hot:] / statistics.tokens
        found.append(1 - silent.reshape(plan.clusters, -1).prod(axis=1)[plan.clusters - plan.cold_clusters(layer) :])
    return np.concatenate(found)


def _held(rates: Floats, time: float) -> float:
    return float((1 - (1 - rates) ** time).sum())
