"""Constants of the estimator from runs of this machine: least squares over its own formula.

A token took ``t0 * layers/32 + weights/(f_w*BW) + KV/(f_kv*BW) + attention_ms * attention`` and a prompt
``t0 * layers/32 + (matrices/mfu + attention/mfu_attention + activation_cost * values)/peak``, with the bandwidth and
the peak of the same moment. Both are linear in t0, in the costs and in the reciprocals of the shares. Runs count by
their relative error, and outliers little (least absolute deviations, found by reweighting).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAYERS = 32
"""Layers that t0_ms is stated for."""
ROUNDS = 20
SAME = 3e-5
"""Smallest singular value, over the largest, of columns that can be told apart."""
SHARES = (0.02, 1.5)
"""Shares that are believed."""


@dataclass(frozen=True)
class DecodeRun:
    """One measurement of decoding."""

    layers: int
    weight_bytes: float
    """Read per token."""
    kv_bytes: float
    """Read per token; the mean over the tokens that were timed."""
    seconds: float
    """Per token."""
    bandwidth_gbs: float
    """What all threads read at that moment."""
    attention_operations: float = 0.0
    """Per token; the mean over the tokens that were timed."""


@dataclass(frozen=True)
class PromptRun:
    """One measurement of a prompt."""

    layers: int
    operations: float
    """Of the matrices, int8, for the whole prompt."""
    attention_operations: float
    seconds: float
    """For the whole prompt."""
    int8_peak_gops: float
    """From registers, at that moment."""
    values: float = 0.0
    """Values between the matrices, for the whole prompt: Traffic.activation_values x tokens."""


def solve_constants(decodes: Sequence[DecodeRun], prompts: Sequence[PromptRun]) -> dict[str, float]:
    """Return f_w, f_kv, attention_ms, t0_ms, mfu, mfu_attention and activation_cost, but what the runs do not show.

    Where they do not show f_w (models that fit the caches), all of decoding's are left out: its time is in t0 then.

    Raises
    ------
    UsageError
        There are no runs of decoding.
    """
    if not decodes:
        raise UsageError("Constants cannot be solved from no runs; measure at least one model.")
    rows = [[run.layers / LAYERS / 1e3, run.weight_bytes / run.bandwidth_gbs / 1e9,
             run.kv_bytes / run.bandwidth_gbs / 1e9, run.attention_operations / 1e12] for run in decodes]
    times = [run.seconds for run in decodes]
    t0_ms, weights, kv, attention_ms = _fit(rows, times)
    if kv < 1:  # models of one kind cannot tell the two apart: no cache is read faster than memory
        t0_ms, weights, kv, attention_ms = *_fit([row[:3] for row in rows], times), 0.0
    out = {"t0_ms": t0_ms, **_share("f_w", weights), **_share("f_kv", kv)} if weights > 0 else {}
    if out and attention_ms:
        out["attention_ms"] = attention_ms
    if prompts:
        rows = [[amount / run.int8_peak_gops / 1e9 for amount in (run.operations, run.attention_operations, run.values)]
                for run in prompts]
        times = [max(run.seconds - t0_ms * run.layers / LAYERS / 1e3, run.seconds / 2) for run in prompts]
        matrices, attention, cost = _fit(rows, times)
        if matrices < 1:  # models of one width cannot tell the two apart: no matrix is faster than the peak
            matrices, attention, cost = *_fit([row[:2] for row in rows], times), 0.0
        out |= {**_share("mfu", matrices), **_share("mfu_attention", attention)}
        if any(run.values for run in prompts):
            out["activation_cost"] = cost
    return out


def _share(name: str, reciprocal: float) -> dict[str, float]:
    """A share, if the runs showed it."""
    return {name: min(max(1 / reciprocal, SHARES[0]), SHARES[1])} if reciprocal > 0 else {}


def _fit(rows: list[list[float]], times: list[float]) -> list[float]:
    """Non-negative factors of the columns that explain the times best, by relative error."""
    import numpy as np

    scaled = np.array(rows) / np.array(times)[:, None]
    weights = np.ones(len(scaled))
    factors = _non_negative(scaled, weights)
    for _ in range(ROUNDS):
        weights = 1 / np.maximum(abs(scaled @ factors - 1), 0.01)
        factors = _non_negative(scaled, weights)
    return [float(factor) for factor in factors]


def _non_negative(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighted least squares towards 1 without negative factors: the best of all subsets of the few columns."""
    import numpy as np

    best, least, root = np.zeros(rows.shape[1]), math.inf, np.sqrt(weights)
    lengths = np.linalg.norm(rows * root[:, None], axis=0)
    seen = np.flatnonzero(lengths)
    for used in (list(some) for n in range(len(seen)) for some in itertools.combinations(seen, n + 1)):
        solution, _, rank, _ = np.linalg.lstsq(rows[:, used] * root[:, None] / lengths[used], root, rcond=SAME)
        if rank < len(used) or solution.min() < 0:
            continue
        factors = np.zeros(len(best))
        factors[used] = solution / lengths[used]
        error = float(weights @ (rows @ factors - 1) ** 2)
        if error < least - 1e-12:  # of two that explain it alike the first: matrices, not attention
            best, least = factors, error
    return best
