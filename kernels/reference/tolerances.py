"""Tolerances of kernels in float32 against their references in float64, per family of kernels: one table."""

from __future__ import annotations

TOLERANCES = {
    "linear": 1e-5,
    "activation": 2e-6,
    "rms_norm": 4e-6,
    "rope": 1e-6,
    "attention": 2e-6,
    "soft_cap": 4e-7,
    "weight": 1.01 / 254,
    "route": 4e-6,
    "sums": 1e-5,
    "conv": 4e-7,
    "state": 2e-5,
    "code": 2e-3,
    "fp16": 2.0**-10,
}
"""linear: share of sum |x w|. activation: share of |gate x up|. rms_norm: share of the value. rope: share of the
rotated pair's size. attention: share of sum p |v|, times 1 + the largest sum |q k|. soft_cap: share of the cap. weight:
half a step of a weight of 7 bits, as a share of the largest. route: share of a score, or of a choice. sums: share of a
sum of exponentials. conv: share of the sum of absolute terms. state: share of the largest value of a recurrent state or
of its output, where that is above 1. code: distance of a float from a tie, in int8 steps, where the quantised value
was itself computed in floats. fp16: share of a scale, a unit in its last place."""

TINY = 1e-30
"""Absolute tolerance that any float has, because kernels may round differently among subnormals."""
