"""The speed of this process at this moment, so that limits in seconds hold on slow and busy machines too."""

from __future__ import annotations

import time

ROUNDS, QUIET_SECONDS = 1_000_000, 0.09
"""A loop, and its processor time on the machine that limits are stated for (Emerald Rapids, Python 3.11)."""
READINGS = 3


def slowness() -> float:
    """Return how many times as long as there the loop takes here and now; at least 1."""
    return max(1.0, *(_loop() / QUIET_SECONDS for _ in range(READINGS)))


def _loop() -> float:
    began, total = time.process_time(), 0
    for i in range(ROUNDS):
        total = (total * 3 + i) & 0xFFFF
    return time.process_time() - began
