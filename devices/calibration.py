"""Constants of the estimator from runs of this machine: least squares over its own formula.

A token took ``t0 * layers/32 + weights/(f_w*BW) + KV/(f_kv*BW) + attention_ms * attention`` and a prompt
``t0 * layers/32 + (matrices/mfu + attention/mfu_attention + activation_cost * values)/peak``, with the bandwidth and
the peak of the same moment. Both are linear in t0, in the costs and in the reciprocals of the shares. Runs count by
their relative error, and outliers little (least absolute deviations, found by reweighting).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.errors import UsageError

LAYERS = 32
"""Layers that t0_ms is stated for."""
ROUNDS = 20
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
    scaled = [[value / seconds for value in row] for row, seconds in zip(rows, times, strict=True)]
    weights = [1.0] * len(scaled)
    factors = _non_negative(scaled, weights)
    for _ in range(ROUNDS):
        off = [abs(sum(f * value for f, value in zip(factors, row, strict=True)) - 1) for row in scaled]
        weights = [1 / max(error, 0.01) for error in off]
        factors = _non_negative(scaled, weights)
    return factors


def _non_negative(rows: list[list[float]], weights: list[float]) -> list[float]:
    """Weighted least squares towards 1 without negative factors: the best of all subsets of the few columns."""
    columns = range(len(rows[0]))
    best, least = [0.0] * len(rows[0]), float("inf")
    for count in columns:
        for used in itertools.combinations(columns, count + 1):
            factors = [0.0] * len(rows[0])
            solution = _solve([[row[i] for i in used] for row in rows], weights)
            if solution is None or min(solution) < 0:
                continue
            for i, value in zip(used, solution, strict=True):
                factors[i] = value
            error = sum(w * (sum(f * v for f, v in zip(factors, row, strict=True)) - 1) ** 2
                        for row, w in zip(rows, weights, strict=True))
            if error < least - 1e-12:  # of two that explain it alike the first: matrices, not attention
                best, least = factors, error
    return best


def _solve(rows: list[list[float]], weights: list[float]) -> list[float] | None:
    """Normal equations by elimination; None where the columns cannot be told apart."""
    n = len(rows[0])
    matrix = [[sum(w * row[i] * row[j] for row, w in zip(rows, weights, strict=True)) for j in range(n)]
              + [sum(w * row[i] for row, w in zip(rows, weights, strict=True))] for i in range(n)]
    scale = [matrix[i][i] for i in range(n)]
    for i in range(n):
        if matrix[i][i] <= 1e-9 * scale[i] or scale[i] == 0:
            return None
        for j in range(n):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
