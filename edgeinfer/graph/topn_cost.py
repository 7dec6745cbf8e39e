"""Share of V that is read if its rows are selected by scores (`--attention`), at any depth: an explicit assumption.

Scores of a head are assumed to be normal, with the standard deviation `SKEW`; the keys of the 16 rows of a block share
the part `SHARED` of their variance; heads that share a KV head select independently. benchmarks/topn_speed.py makes
such scores, and its counts agree with this prediction within a fifth. The trained models measured so far read less
(docs/explanation/long-context.md has both).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from edgeinfer.kernels import abi

SKEW, SHARED = 2.5, 0.5
"""Standard deviation of scores, and the part of their variance that a block's rows have in common."""
MEAN_ROWS = abi.MEAN_BLOCKS * abi.BLOCK_TOKENS
"""Rows whose mean stands for those that are left out."""
_STEP = 0.25
_NORMAL = tuple((_STEP * i, _STEP * math.exp(-((_STEP * i) ** 2) / 2) / math.sqrt(2 * math.pi)) for i in range(-20, 21))
"""Values of a normal variable with their weights."""


class TopNCost(NamedTuple):
    """Selection of V by decoded tokens: `top` rows of a head, or if that is 0 those that weigh at least `eps` times its
    largest weight.
    """

    eps: float
    top: int
    group: float
    """Heads that share a KV head: a block is read where one of them needs a row."""
    skew: float = SKEW
    mean: bool = True
    """True if a mean of V stands for the rest, whose rows are read too."""

    def rows(self, depth: float) -> float:
        """Return about how many rows of V a token reads of a KV head after `depth` positions, the mean's included."""
        if depth <= 0 or self.top >= depth or not (self.top or self.eps):
            return depth
        if self.top:
            least = _quantile(1 - self.top / depth)
        else:
            least = _largest(depth) + math.log(self.eps) / self.skew
        share = 1 - (1 - block_share(least)) ** self.group
        return min(depth, share * depth + self.mean * MEAN_ROWS)


def block_share(least: float) -> float:
    """Return the share of the blocks in which a score is at least this many standard deviations above the mean."""
    own, common = math.sqrt(2 * (1 - SHARED)), math.sqrt(SHARED)
    below = ((1 + math.erf((least - common * z) / own)) / 2 for z, _ in _NORMAL)
    return 1 - math.fsum(p**abi.BLOCK_TOKENS * weight for p, (_, weight) in zip(below, _NORMAL, strict=True))


@cache
def _largest(depth: float) -> float:
    """The median of the largest of this many scores, in standard deviations."""
    wanted = 1 - 0.5 ** (abi.BLOCK_TOKENS / depth)
    return _where(lambda least: block_share(least) > wanted)


def _quantile(share: float) -> float:
    """Return the score that this share of the scores stays below."""
    return _where(lambda least: (1 + math.erf(least / math.sqrt(2))) / 2 < share)


def _where(still: Callable[[float], bool]) -> float:
    """Up to which number something holds."""
    low, high = -8.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if still(middle) else (low, middle)
    return low
