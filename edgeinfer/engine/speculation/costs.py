"""Costs of decoding on this machine: of a token without speculation, and of all else as a multiple of that.

Without speculation a pass may take several steps by itself (`Runner.decode`), and a token costs a share of it.
Verifying and drafting are kept as multiples of that cost at the same depth and in the same minute: a deeper context, or
a machine shared with others, changes both alike. All are medians of a few recent measurements, and of one or two the
least, because disturbances make a measurement longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

KEPT = 7
"""Recent measurements of each kind whose median counts."""
DEPTH_STEP = 128
"""Tokens of context of a bucket of measurements."""
MAX_BUCKETS = 64
"""Buckets that are kept, the latest."""
ENOUGH = 3
"""Passes without speculation before anything is compared with them: the first of a process finds cold caches."""
WHOLE, LONGER = 0.75, 1.34
"""A pass of less than the first share of the most tokens of a pass was truncated. From the second share on,
the measurement before was."""
SHORT_IN_TURN = 8
"""Passes in turn that were all shorter: they are as long as they get now."""
SLOPE, PYTHON_SECONDS = 0.12, 2e-4
"""Assumed cost of a further token in a pass, as a share of the first, and Python's time per pass, until they are
measured.
"""
DRAFT, READ = 0.3, 0.03
"""Assumed costs of a drafted token and of reading a prompt token, as shares of a token of the model, until they are
measured.
"""
DOUBT = 2.5
"""Factor by which a cost may turn out higher than assumed."""
RETRY_SLOPE = 1.5
"""Factor over the assumed cost above which a measured one is doubted when verifying is tried again."""
REFIT = 16
"""Passes after which the line through all depths is fitted again; in between the latest passes shift it."""
NOISE = 0.05
"""Share by which medians of measurements differ without a reason."""
SHORTEST = 5e-4
"""Seconds of a token below which Python's part of a pass that verifies is too large a share of it."""


class Costs:
    """Measured costs of passes over some number of texts together."""

    def __init__(self, texts: int = 1):
        self._texts = texts
        self._buckets: dict[int, deque[tuple[int, float]]] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=5)
        self._line: tuple[float, float] | None = None
        self._raised: float | None = None
        self._most = self._shorter = 0
        self._ratios: dict[str, dict[int, deque[float]]] = {}
        self.plain_passes = 0
        """Whole passes without speculation that this process has measured."""

    # -- without speculation -----------------------------------------------------------------------------------------

    def plain(self, depth: int, tokens: int, seconds: float) -> bool:
        """Record of a pass that gave each text this many tokens; return whether it was a whole one."""
        if tokens > LONGER * self._most:
            self._most, self._shorter, self.plain_passes = tokens, 0, 0
            self._buckets.clear()
            self._recent.clear()
            self._line = None
        elif tokens < WHOLE * self._most:
            self._shorter += 1
            if self._shorter < SHORT_IN_TURN:
                return False
            self._most = tokens
        self._shorter = 0
        self.plain_passes += 1
        measured = depth + tokens // 2, seconds / tokens
        self._bucket(depth).append(measured)
        self._recent.append(measured)
        self._raised = None
        if self.plain_passes % REFIT == 0 or len(self._bucket(depth)) == 1:
            self._line = None
        return True

    def _bucket(self, depth: int) -> deque[tuple[int, float]]:
        key = depth // DEPTH_STEP
        bucket = self._buckets.pop(key, None) or deque(maxlen=KEPT)
        self._buckets[key] = bucket  # the latest is the last
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket

    @property
    def known(self) -> bool:
        """True if a token's cost is known well enough to compare with."""
        return self.plain_passes >= ENOUGH

    def reaches(self, depth: int) -> bool:
        """Return whether a token's cost was measured at about such a depth."""
        deepest = max((points[-1][0] for points in self._buckets.values()), default=0)
        return depth <= 1.5 * deepest + 64

    def token(self, depth: int) -> float:
        """Return the seconds that a step takes at a depth, by a line through the medians of all depths, which is
        raised or lowered to the latest passes."""
        first, each = self._through()
        if self._raised is None:
            from statistics import median

            self._raised = median(self._beside(first, each))
        return (first + each * depth) * self._raised

    def short(self, depth: int) -> bool:
        """Return whether a token takes so little that verifying drafts is no use: Python's part of it dominates.

        The fastest of the latest passes counts, and one is enough: disturbances make a pass longer.
        """
        if self._most <= 1:
            return False
        first, each = self._through()
        return (first + each * depth) * min(self._beside(first, each)) < SHORTEST

    def _through(self) -> tuple[float, float]:
        if self._line is None:
            from statistics import median_low  # random and fractions with it: 2 ms that no first token needs

            points = [tuple(map(median_low, zip(*bucket, strict=True))) for bucket in self._buckets.values()]
            self._line, self._raised = _line(points), None
        return self._line

    def _beside(self, first: float, each: float) -> list[float]:
        """Return how many times as long as by the line the latest passes took."""
        return [seconds / (first + each * at) for at, seconds in self._recent]

    # -- verifying and drafting --------------------------------------------------------------------------------------

    def took(self, what: str, n: int, ratio: float) -> None:
        """Record the cost of `what` over n tokens, in steps without speculation."""
        self._ratios.setdefault(what, {}).setdefault(n, deque(maxlen=KEPT)).append(ratio)

    def doubt(self, drafter: str, free: bool) -> float:
        """Return how many times as much as assumed verifying and drafting may turn out to cost."""
        return 1.0 if "verify" in self._ratios and (free or drafter in self._ratios) else DOUBT

    def verify(self, n: int, depth: int, doubting: bool = False) -> float:
        """Return the cost of a pass over n tokens, between the nearest numbers known, in steps without speculation.

        Parameters
        ----------
        n, depth : tokens of the pass, and before it
        doubting : count nothing for much more than would be assumed without measurements
        """
        assumed = self._assumed(n, depth)
        known = self._ratios.get("verify", {})
        found = _value(known[n]) if n in known else assumed
        if known and n not in known:
            below = max((m for m in known if m < n), default=None)
            above = min((m for m in known if m > n), default=None)
            if below is not None and above is not None:
                low, high = _value(known[below]), _value(known[above])
                found = low + (n - below) / (above - below) * (high - low)
            else:
                nearest = below if above is None else above
                assert nearest is not None
                found = assumed * _value(known[nearest]) / self._assumed(nearest, depth)
        return min(found, RETRY_SLOPE * assumed) if doubting else found

    def _assumed(self, n: int, depth: int) -> float:
        more = (1 + SLOPE * (n - 1)) / (1 + SLOPE * (self._texts - 1))
        return more + (PYTHON_SECONDS / self.token(depth) if self._most > 1 else 0.0)

    def draft(self, name: str, n: int, depth: int, free: bool) -> float:
        """Return the cost of drafting n tokens of each text, in steps without speculation."""
        known = self._ratios.get(name, {})
        if not known:
            return 0.0 if free else DRAFT * n + PYTHON_SECONDS / self.token(depth)
        nearest = min(known, key=lambda m: abs(m - n))
        return _value(known[nearest]) * (1.0 if n == nearest or free else n / nearest)

    def read(self, name: str) -> float:
        """Return the cost of a drafter's reading of a token of the prompt, in steps without speculation."""
        known = self._ratios.get(f"{name}, reading", {}).get(1)
        return _value(known) if known else READ


class Times:
    """The costs of one model, which all its requests share, and how many of a drafter's tokens were right."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, bool], Costs] = {}
        self.right: dict[str, list[float]] = {}
        """Acceptance by drafter at each place of a draft, given that the tokens before were accepted."""

    def of(self, texts: int, each: bool = False) -> Costs:
        """Return the costs of passes over some number of texts; each: where none may take several steps."""
        found = self._costs.get((texts, each))
        if found is None:
            found = self._costs[texts, each] = Costs(texts)
        return found


def _value(measured: Iterable[float]) -> float:
    known = sorted(measured)
    return known[0] if len(known) < 3 else known[(len(known) - 1) // 2]


def _line(points: list[Any]) -> tuple[float, float]:
    """Return the line of least squares through points, the flatter the less its slope is beyond noise; one that falls
    is laid flat."""
    n = len(points)
    x, y = (sum(column) / n for column in zip(*points, strict=True))
    spread = sum((at - x) ** 2 for at, _ in points)
    slope = max(0.0, sum((at - x) * (value - y) for at, value in points) / spread) if spread else 0.0
    if slope:
        slope *= max(0.0, 1 - (NOISE * y / slope) ** 2 / spread)
    if y - slope * x <= 0:
        return y, 0.0
    return y - slope * x, slope
