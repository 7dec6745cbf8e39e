"""Extent of the measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Lengths and numbers of the measurements; the default is for GPUs."""

    sequences: tuple[int, ...] = (1, 8, 32)
    depths: tuple[int, ...] = (0, 4096)
    prompts: tuple[int, ...] = (512, 4096)
    steps: int = 48
    prompt: int = 256
    """Tokens of prompts that arrive one after the other."""
    soak_seconds: float = 180


QUICK = Sizes((1, 2), (0, 32), (16, 64), 4, 16, 1)
"""To try the script."""
