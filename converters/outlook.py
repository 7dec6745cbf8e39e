"""Estimate the size of a bundle and the duration of its conversion before the conversion starts."""

from __future__ import annotations

from math import prod
from pathlib import Path

from edgeinfer.base.units import format_size
from edgeinfer.graph import Graph

from .checkpoint.directory import Checkpoint

MOVED_BYTES_PER_S, QUANTISED_PER_S, ROUNDED_PER_S = 250e6, 9e6, 40e6
"""Speeds at which weights are copied, quantised with a search for scales, and rounded or widened."""


def outlook(source: str | Path, destination: str | Path, read_bytes: int, nbytes: int, duration: float | None) -> str:
    """Say how large a bundle will be, and how long it takes to make, if that is known."""
    return (f"Converting {source} ({format_size(read_bytes)}) to a bundle of {format_size(nbytes)} in {destination}"
            + ("." if duration is None else f"; this takes about {max(1, round(duration))} s."))


def seconds(checkpoint: Checkpoint, graph: Graph) -> float:
    """Estimate the duration of a conversion, from one on two shared cores of Zen 3."""
    total = 0.0
    for weight in graph.weights:
        stored = graph.types[weight.name]
        if checkpoint.moved(weight, stored, lambda *_: None, []):
            total += stored.nbytes(weight.shape) / MOVED_BYTES_PER_S
        else:
            total += prod(weight.shape) / (QUANTISED_PER_S if stored.quantised else ROUNDED_PER_S)
    return total
