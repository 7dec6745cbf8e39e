"""Constants fitted to published rows, and three predictions of a row: estimator, one constant, parameters alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.devices import classes, constants_of, decode_terms, load_profile
from edgeinfer.errors import UsageError

from .rows import Row

F_W_STEP, ISSUE_STEP = 0.005, 0.1
PARAMETERS_ONLY = {  # the formula of llmfit: tokens/s = K / 1e9 parameters x factor of the quantisation
    "apple-gpu": 160, "cuda-consumer": 220, "cuda-datacentre": 220, "cuda-embedded": 220, "radeon": 180, "igpu": 100,
    "npu": 90, "arm-sbc": 90, "arm-phone": 90, "arm-laptop": 90, "arm-server": 90, "x86-desktop": 70, "x86-laptop": 70,
}
QUANTISATION_FACTORS = (("F16", 0.6), ("Q8", 0.8), ("w8", 0.8), ("Q5", 1.0), ("Q3", 1.25), ("Q2", 1.35), ("", 1.15))


@dataclass(frozen=True)
class Prediction:
    """A row beside what was predicted for it."""

    row: Row
    tok_per_s: float
    one_constant: float
    parameters_only: float

    @property
    def miss(self) -> float:
        """Predicted over measured, less one."""
        return self.tok_per_s / self.row.tok_per_s - 1


def predict_with_profile(row: Row) -> float | None:
    """Tokens per second by the profile that `edgeinfer estimate` takes for the device; None if there is none."""
    try:
        profile = load_profile(row.device)
    except UsageError:
        return None
    return 1000 / math.fsum(decode_terms(profile, row.traffic, constants_of(profile), row.positions).values())


def mean_miss(misses: Iterable[float]) -> float:
    """Mean absolute error."""
    return statistics.fmean(abs(miss) for miss in misses)


def predict(row: Row, table: Mapping[str, Any]) -> float:
    """Tokens per second by the estimator with the constants of a table."""
    profile = row.profile
    return 1000 / math.fsum(decode_terms(profile, row.traffic, constants_of(profile, table), row.positions).values())


def parameters_only(row: Row) -> float:
    """Tokens per second by the number of parameters and the kind of device, without any bandwidth."""
    factor = next(factor for name, factor in QUANTISATION_FACTORS if name in row.model)
    return PARAMETERS_ONLY[row.device_class] / (row.parameters / 1e9) * factor


def fit_one_constant(rows: Sequence[Row]) -> float:
    """The share of the bandwidth that explains the rows best if nothing but reading the weights took time.

    Least squares of the relative error of the time per token, as in `fit`.
    """
    ratios = [row.read_bytes * row.tok_per_s / 1e9 / row.profile.bandwidth_gbs for row in rows]
    return sum(ratio * ratio for ratio in ratios) / sum(ratios)


def fit(rows: Sequence[Row], base: Mapping[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """Fit constants to rows: least squares of the relative error of the time per token.

    Parameters
    ----------
    rows : sequence of Row
    base : mapping
        Constants of the class; those that are not fitted stay.
    free : sequence of {'t0_ms', 'f_w', 'issue_bytes_per_clock'}
        t0_ms is among them; for the others a grid is searched, for each of its points t0_ms has a closed form.
    """
    shares = _grid(0.5, 1.05, F_W_STEP) if "f_w" in free else [base["f_w"]]
    issues = _grid(4.0, 12.0, ISSUE_STEP) if "issue_bytes_per_clock" in free else [base.get("issue_bytes_per_clock")]
    best: tuple[float, dict[str, Any]] | None = None
    for share in shares:
        for issue in issues:
            table = {**base, "f_w": share, **({"issue_bytes_per_clock": issue} if issue else {})}
            error, table["t0_ms"] = _fit_overhead(rows, table)
            if best is None or error < best[0] - 1e-12:
                best = error, table
    assert best is not None
    return best[1]


def leave_one_device_out(rows: Sequence[Row], base: Mapping[str, Any], free: Sequence[str]) -> list[Prediction]:
    """Predict every row with constants fitted to the other devices."""
    found = []
    for device in dict.fromkeys(row.device for row in rows):
        others = [row for row in rows if row.device != device]
        table, share = fit(others, base, free), fit_one_constant(others)
        found += [prediction(row, table, share) for row in rows if row.device == device]
    return found


def in_sample(rows: Sequence[Row]) -> list[Prediction]:
    """Predict every row with the constants of its class; the one constant is fitted to the same rows, by class."""
    shares = {kind: fit_one_constant([row for row in rows if row.device_class == kind])
              for kind in {row.device_class for row in rows}}
    return [prediction(row, classes()[row.device_class], shares[row.device_class]) for row in rows]


def prediction(row: Row, table: Mapping[str, Any], share: float) -> Prediction:
    """Put the three predictions of a row together."""
    return Prediction(row, predict(row, table), share * row.profile.bandwidth_gbs * 1e9 / row.read_bytes,
                      parameters_only(row))


def _fit_overhead(rows: Sequence[Row], table: Mapping[str, Any]) -> tuple[float, float]:
    """Best t0_ms, and the sum of squared relative errors that it leaves."""
    fixed, rest = [], []
    for row in rows:
        profile = row.profile
        terms = decode_terms(profile, row.traffic, constants_of(profile, {**table, "t0_ms": 1.0}), row.positions)
        fixed.append(terms["overhead"] * row.tok_per_s / 1000)
        rest.append((math.fsum(terms.values()) - terms["overhead"]) * row.tok_per_s / 1000)
    t0 = max(sum(a * (1 - b) for a, b in zip(fixed, rest, strict=True)) / sum(a * a for a in fixed), 0.0)
    return sum((t0 * a + b - 1) ** 2 for a, b in zip(fixed, rest, strict=True)), t0


def _grid(low: float, high: float, step: float) -> list[float]:
    return [round(low + i * step, 6) for i in range(round((high - low) / step) + 1)]
