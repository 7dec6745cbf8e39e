"""Matmuls over several rows: the tokens of a pass that verifies drafts, one of each sequence, or parts of prompts.

Weights are read once for all rows, and arithmetic grows with the rows. Most of the reading goes on while rows are
multiplied; a part of it, which the probe measures, does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.base.dataclass import dataclass

from .calibration import LAYERS
from .device_classes import Constants
from .profile import PROCESSORS, DeviceProfile

CORES = (*PROCESSORS, "local")
FEW_ROWS, FEW_ROWS_FAST, FAST, MOST_FEW = 0.46, 0.31, ("avxvnni", "avx512vnni", "neon_i8mm"), 16
"""Shares of the int8 peak that 2 to 16 rows reach on processors of which the probe does not say it, where prompts reach
0.74: weights are unpacked for every few rows. It weighs more where dot products are fast.
docs/measurements/speculation.md derives them for AVX2 and AVX-512 VNNI; the other two are taken to be like the latter.
"""
OVERLAP = 4
"""Exponent by which reading and arithmetic that go on together add up: the longer one, and little more where both take
as long (docs/measurements/estimator.md)."""
STEP = 0.02
"""Steps of the search for both shares."""


@dataclass(frozen=True)
class RowsRun:
    """One measurement of a pass over a few rows."""

    layers: int
    rows: int
    weight_bytes: float
    operations: float
    """Of all rows."""
    values: float
    """Values between the matrices, for all rows."""
    seconds: float
    bandwidth_gbs: float
    int8_peak_gops: float


def peak_of(profile: DeviceProfile, constants: Constants) -> float | None:
    """Operations in 1e9 a second that mfu refers to."""
    peaks = {"int8": profile.int8_peak_gops, "f32": profile.f32_peak_gflops, "f16": profile.f16_peak_gflops}
    return peaks[constants.peak]


def weights_ms(profile: DeviceProfile, constants: Constants, operations: float, reading_ms: float, rows: int) -> float:
    """Return the milliseconds of the weights for several rows.

    On processors up to 16 rows reach a smaller share of the peak than prompts, and more rows take at least as long as
    16. Where the probe has not measured how much of the reading arithmetic hides, their squares are added: near the
    border of both neither hides the other.

    Parameters
    ----------
    profile : DeviceProfile
    constants : Constants
    operations : float
        Of one row.
    reading_ms : float
        Time of reading the weights.
    rows : int
    """
    peak = peak_of(profile, constants)
    if rows == 1 or not peak:
        return reading_ms
    arithmetic = rows * operations / constants.mfu
    if profile.device_class in CORES:
        share = constants.few_rows or (FEW_ROWS_FAST if profile.isa in FAST else FEW_ROWS)
        arithmetic = max(arithmetic, min(rows, MOST_FEW) * operations / share)
    return together_ms(constants, reading_ms, arithmetic / peak / 1e6)


def together_ms(constants: Constants, reading_ms: float, arithmetic_ms: float) -> float:
    """Return the time of reading weights and of multiplying them meanwhile."""
    if not constants.few_rows:
        return math.hypot(reading_ms, arithmetic_ms)
    hidden = (1 - constants.unhidden) * reading_ms
    return float(constants.unhidden * reading_ms + (hidden**OVERLAP + arithmetic_ms**OVERLAP) ** (1 / OVERLAP))


def activations_ms(profile: DeviceProfile, constants: Constants, values: float, rows: int) -> float:
    """Return the milliseconds of the work on so many values of each row; 0 where the peak is not known."""
    peak = peak_of(profile, constants)
    return constants.activation_cost * values * rows / peak / 1e6 if peak and constants.few_rows else 0.0


def solve_rows(runs: Sequence[RowsRun], known: Mapping[str, Any]) -> dict[str, float]:
    """Return `few_rows` and `unhidden`, by which runs miss the least; nothing without runs or the other shares.

    Parameters
    ----------
    runs : sequence of RowsRun
    known : mapping
        The other constants of the machine.
    """
    def missed(few_rows: float, unhidden: float) -> float:
        constants = Constants(few_rows=few_rows, unhidden=unhidden)
        return math.fsum(abs(math.log((fixed + together_ms(constants, reading, max(most, few / few_rows))) / taken))
                         for taken, fixed, reading, most, few in parts)

    parts = [_parts(run, Constants(**known)) for run in runs if {"f_w", "mfu"} <= known.keys()]
    steps = [STEP * i for i in range(1, round(1 / STEP) + 1)]
    if not parts:
        return {}
    few_rows, unhidden = min(((few, part - STEP) for few in steps for part in steps), key=lambda pair: missed(*pair))
    return {"few_rows": round(few_rows, 2), "unhidden": round(unhidden, 2)}


def _parts(run: RowsRun, known: Constants) -> tuple[float, float, float, float, float]:
    """Return the milliseconds of a run: measured, of fixed costs, of reading, of its arithmetic at the share of
    prompts, and of that of at most 16 rows at the whole peak."""
    peak = run.int8_peak_gops * 1e6
    fixed = known.token_ms + known.t0_ms * run.layers / LAYERS + known.activation_cost * run.values / peak
    few = run.operations * min(1.0, MOST_FEW / run.rows) / peak
    return (run.seconds * 1e3, fixed, run.weight_bytes / (known.f_w * run.bandwidth_gbs) / 1e6,
            run.operations / known.mfu / peak, few)
