"""Matmuls over several rows: the tokens of a pass that verifies drafts, or one of each sequence."""

from __future__ import annotations

import math

from .device_classes import Constants
from .profile import PROCESSORS, DeviceProfile

CORES = (*PROCESSORS, "local")
FEW_ROWS, FEW_ROWS_FAST, FAST, MOST_FEW = 0.46, 0.31, ("avxvnni", "avx512vnni", "neon_i8mm"), 16
"""Shares of the int8 peak that 2 to 16 rows reach on processors, where prompts reach 0.74: weights are unpacked for
every few rows. It weighs more where dot products are fast. docs/measurements/speculation.md derives them for AVX2 and
AVX-512 VNNI; the other two are taken to be like the latter."""


def peak_of(profile: DeviceProfile, constants: Constants) -> float | None:
    """Operations in 1e9 a second that mfu refers to."""
    peaks = {"int8": profile.int8_peak_gops, "f32": profile.f32_peak_gflops, "f16": profile.f16_peak_gflops}
    return peaks[constants.peak]


def weights_ms(profile: DeviceProfile, constants: Constants, operations: float, reading_ms: float, rows: int) -> float:
    """Return the milliseconds of the weights for several rows.

    They are read once for all rows; arithmetic grows with the rows. Near the border of both neither hides the other,
    so their squares are added. On processors up to 16 rows reach a smaller share of the peak than prompts, and more
    rows take at least as long as 16.

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
        share = FEW_ROWS_FAST if profile.isa in FAST else FEW_ROWS
        arithmetic = max(arithmetic, min(rows, MOST_FEW) * operations / share)
    return math.hypot(reading_ms, arithmetic / peak / 1e6)
