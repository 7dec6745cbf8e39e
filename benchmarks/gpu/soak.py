"""Minutes of prompts, forks and steps, in which no memory may grow."""

from __future__ import annotations

import time

from edgeinfer.backends import gpu_free_bytes
from edgeinfer.base.process import peak_rss_bytes

from .models import bundle_of, filled, median_step, opened
from .rows import Check

GPU_GROWTH, GROWTH = 2 << 20, 8 << 20
"""Wanted: at most so many bytes more than after a third of the time."""
STEPS = 32
"""Decode steps of each round, by whose rate the speed at the end is compared with that at the beginning."""


def soak(check: Check, names: list[str], seconds: float) -> None:
    """Load every model for so many seconds."""
    for name in names:
        check.case(f"{name}: load", lambda name=name: load(check, name, seconds))  # type: ignore[misc]


def load(check: Check, name: str, seconds: float) -> None:
    """Run rounds of four forks of a prompt, and compare memory and speed of the end with those of the first third."""
    with opened(bundle_of(name), check.provider, ctx=128, max_sequences=4) as runner:
        marks, until = list[tuple[int, int, float]](), time.monotonic() + seconds
        while time.monotonic() < until or len(marks) < 3:
            held = filled(runner, 4, 48)
            step = median_step(runner, held, STEPS)
            for sequence in held:
                runner.release(sequence)
            marks.append((gpu_free_bytes() if check.cuda else 0, peak_rss_bytes() or 0, step))
    start, end = marks[len(marks) // 3], marks[-1]
    device, host = start[0] - end[0], end[1] - start[1]
    check.add(f"{name}: growth in {seconds:.0f} s of load, {len(marks)} rounds",
              f"{device / 1e6:.1f} MB of the GPU's memory, {host / 1e6:.1f} MB of the process's; steps of "
              f"{1000 * start[2]:.2f} ms, at the end {1000 * end[2]:.2f}", "no growth",
              device <= GPU_GROWTH and host <= GROWTH)
