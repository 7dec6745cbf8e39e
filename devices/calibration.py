"""Constants of the estimator from runs of this machine: least squares over its own formula.

A token took ``token + t0 * layers/32 + weights/(f_w*BW) + KV/(f_kv*BW) + attention_ms * attention`` and a prompt
``token + t0 * layers/32 + (matrices/mfu + attention/mfu_attention + activation_cost * values)/peak``, with the
bandwidth and the peak of the same moment. Both are linear in token, t0, the costs and the reciprocals of the shares.
Runs count by their relative error, and outliers little (least absolute deviations, found by reweighting).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

from .profile import CONSTANTS, LEAST

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAYERS = 32
"""Layers that t0_ms is stated for."""
ROUNDS = 20
SAME = 3e-5
"""Smallest singular value, relative to the largest, of distinguishable columns."""
SHARES = (0.02, 1.0)
"""Shares that are believed: nothing is read or multiplied faster than the machine reads or multiplies."""
SLACK = 1.1
"""A run may beat the reading beside it by this much: both are short."""
MAX_IMPOSSIBLE = 0.2
"""Part of the runs that may be impossible, and are left out then."""
MIN_READING = 0.5
"""Median of the readings of the peak as a share of the best, below which they measured other programs."""


@dataclass(frozen=True)
class DecodeRun:
    """One measurement of decoding."""

    layers: int
    weight_bytes: float
    """Read per token."""
    kv_bytes: float
    """Read per token; the mean over the tokens that were timed."""
    seconds: float
    """Seconds per token."""
    bandwidth_gbs: float
    """Bandwidth of all threads at that moment."""
    attention_operations: float = 0.0
    """Operations per token, the mean over the tokens that were timed."""


    @property
    def share(self) -> float:
        """Share of the bandwidth measured beside it; above 1 one of the two was disturbed."""
        return (self.weight_bytes + self.kv_bytes) / (self.seconds * self.bandwidth_gbs * 1e9)


@dataclass(frozen=True)
class PromptRun:
    """One measurement of a prompt."""

    layers: int
    operations: float
    """Int8 operations of the matrices for the whole prompt."""
    attention_operations: float
    seconds: float
    """Seconds of the whole prompt."""
    int8_peak_gops: float
    """Int8 peak from registers, measured at that moment."""
    values: float = 0.0
    """Values between the matrices, for the whole prompt: Traffic.activation_values x tokens."""

    @property
    def share(self) -> float:
        """Share of the peak measured beside it; above 1 one of the two was disturbed."""
        return (self.operations + self.attention_operations) / (self.seconds * self.int8_peak_gops * 1e9)


Run = TypeVar("Run", DecodeRun, PromptRun)


def contradictions(decodes: Sequence[DecodeRun], prompts: Sequence[PromptRun]) -> list[str]:
    """Return the contradictions between runs and the readings beside them, or among these; empty if they can be
    believed.
    """
    said = []
    for runs, kind, limit in ((decodes, "tokens", "bandwidth"), (prompts, "prompts", "int8 peak")):
        shares = [run.share for run in runs]
        if sum(share > SLACK for share in shares) > MAX_IMPOSSIBLE * len(shares):
            said.append(f"{kind} reached up to {max(shares):.2f} of the {limit} that was read beside them")
    peaks = [run.int8_peak_gops for run in prompts]
    if peaks and statistics.median(peaks) < MIN_READING * max(peaks):
        said.append(f"the int8 peak was read as {min(peaks):.0f} to {max(peaks):.0f} GOPS")
    return said


def believable(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that are not faster than the machine was beside them."""
    return [run for run in runs if run.share <= SLACK]


def solve_constants(decodes: Sequence[DecodeRun], prompts: Sequence[PromptRun]) -> dict[str, float]:
    """Return f_w, f_kv, attention_ms, token_ms, t0_ms, mfu, mfu_attention, activation_cost, as far as runs show.

    If they do not show f_w (models that fit the caches), all of decoding's are left out: its time is in t0 then. Each
    is one that a profile may hold: disturbed runs of a small model give its attention any time.

    Raises
    ------
    UsageError
        There are no runs of decoding.
    """
    if not decodes:
        raise UsageError("Constants cannot be solved from no runs; measure at least one model.")
    rows = [[run.layers / LAYERS / 1e3, 1e-3, run.weight_bytes / run.bandwidth_gbs / 1e9,
             run.kv_bytes / run.bandwidth_gbs / 1e9, run.attention_operations / 1e12] for run in decodes]
    times = [run.seconds for run in decodes]
    t0_ms, token_ms, weights, kv, attention_ms = _fit(rows, times)
    if kv < 1:  # models of one kind cannot tell the two apart: no cache is read faster than memory
        t0_ms, token_ms, weights, kv, attention_ms = *_fit([row[:4] for row in rows], times), 0.0
    out = {"t0_ms": t0_ms, **_share("f_w", weights), **_share("f_kv", kv)} if weights > 0 else {}
    if out:  # constants without evidence in the runs are left out
        out |= {name: value for name, value in (("attention_ms", attention_ms), ("token_ms", token_ms)) if value}
    if prompts:
        rows = [[amount / run.int8_peak_gops / 1e9 for amount in (run.operations, run.attention_operations, run.values)]
                for run in prompts]
        times = [max(run.seconds - (token_ms + t0_ms * run.layers / LAYERS) / 1e3, run.seconds / 2) for run in prompts]
        matrices, attention, cost = _fit(rows, times)
        if matrices < 1:  # models of one width cannot tell the two apart: no matrix is faster than the peak
            matrices, attention, cost = *_fit([row[:2] for row in rows], times), 0.0
        out |= {**_share("mfu", matrices), **_share("mfu_attention", attention)}
        if any(run.values for run in prompts):
            out["activation_cost"] = cost
    return {name: min(value, CONSTANTS[name]) if value >= LEAST else 0.0 for name, value in out.items()}


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
