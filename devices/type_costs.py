"""Costs of storage types of weights: how fast their codes are unpacked in decoding, and multiplied in prompts.

In decoding the memory is one limit and unpacking the other: time = weights / f_w * (1/BW^4 + 1/unpacked^4)^(1/4). The
probe measures with one thread how many GB/s of each of `TYPES` are unpacked, which the memory then limits least; other
types are taken for q4. The constants of a machine therefore hold for bytes of any type at any bandwidth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

TYPES = REFERENCE_TYPE, *_ = ("q4", "int8", "q4k", "q5", "q6")
"""Types whose costs the probe measures: those of `--weights q4` and int8, and of files such as Q4_K_M with rows of any
width. The constants of a machine hold for the first one."""
TypeShares = tuple[tuple[str, float, float], ...]
"""Types of a model's matrices, each with its shares of the bytes and of the operations of a token."""
MATRICES = 0.9
"""Share of the matrices in the time of a short prompt of the probe's model; norms and attention take the rest
(docs/measurements/estimator.md)."""
SHARPNESS = 4
"""Exponent of the soft minimum of both limits."""
HIDDEN = 0.05
"""Share of a token's time within which unpacking does not show behind the memory."""


def unpacked_gbs(dtype: str) -> str:
    """Return the name of the figure of a profile that says how many GB/s of a type all threads unpack."""
    return f"unpacked_gbs_{dtype}"


def arithmetic_of(dtype: str) -> str:
    """Return the name of the figure of a profile that says how long an operation takes, over one with q4."""
    return f"arithmetic_{dtype}"


def costs_of(figures: Mapping[str, float], bandwidth_gbs: float, types: TypeShares) -> tuple[float, float]:
    """Return the time of a model's bytes over that of the memory alone, and of its operations over those with q4."""
    others = figures.get(unpacked_gbs(REFERENCE_TYPE), math.inf)
    unpacking = math.fsum(share / figures.get(unpacked_gbs(dtype), others) for dtype, share, _ in types)
    arithmetic = math.fsum(share * (figures.get(arithmetic_of(dtype), 1.0) - 1) for dtype, _, share in types)
    return (1 + (bandwidth_gbs * unpacking) ** SHARPNESS) ** (1 / SHARPNESS), 1 + arithmetic


def drawn_gbs(figures: Mapping[str, float], bandwidth_gbs: float, f_w: float) -> float:
    """Return the GB/s that decoding of q4 draws from the memory."""
    return bandwidth_gbs * min(f_w, 1.0) / costs_of(figures, bandwidth_gbs, ((REFERENCE_TYPE, 1.0, 1.0),))[0]


def solve_type(dtype: str, weight_bytes: float, tokens: Sequence[tuple[float, float]], prompts: Sequence[float],
               threads: float) -> Iterator[tuple[str, float]]:
    """Yield the figures of a type.

    Parameters
    ----------
    dtype : str
    weight_bytes : float
        Of a token.
    tokens : sequence of tuple
        Seconds of a token with one thread, and the bandwidth of one thread at that moment.
    prompts : sequence of float
        Times of prompts over those of the same model in q4 at the same moment.
    threads : float
        Threads that all of the machine's are worth in arithmetic.
    """
    found = []
    for seconds, gbs in tokens:
        reading = weight_bytes / gbs / 1e9
        hidden = min(reading, (1 - HIDDEN) * seconds)
        found.append((seconds**SHARPNESS - hidden**SHARPNESS) ** (1 / SHARPNESS))
    yield unpacked_gbs(dtype), float(f"{threads * weight_bytes / statistics.median(found) / 1e9:.4g}")
    if dtype != REFERENCE_TYPE:
        yield arithmetic_of(dtype), round(1 + (statistics.median(prompts) - 1) / MATRICES, 4)
