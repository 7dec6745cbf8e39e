"""Acceptance of drafted tokens: by drafter and level, for each place in a draft, with the latest counting most."""

from __future__ import annotations

from collections.abc import Sequence as Items

PRIOR_ROUNDS, MIN_SHARE = 3, 0.083
"""Number of rounds that the drafter's own estimate counts for, and the least weight of the latest round (its half-life
is 8 rounds).
"""
WAIT, LONGEST_WAIT = 32, 4096
"""Tokens until a drafter that did not pay is tried, or observed, again: at first, and after many failures."""


class Level:
    """Acceptance rate of the drafted tokens of one level of a drafter."""

    def __init__(self, prior: float, right: Items[float] = ()) -> None:
        self._prior = prior
        self.right: list[float] = list(right)
        """Acceptance at each place of a draft, given that the tokens before were accepted."""
        self.rounds: list[int] = [PRIOR_ROUNDS] * len(self.right)
        self.wait, self.left = WAIT, 0
        self.on = self.off = False

    def expected(self, n: int) -> float:
        """Return the tokens that verifying n drafted tokens gives."""
        total = reached = 1.0
        for place in range(n):
            reached *= self.right[place] if place < len(self.right) else self._unknown()
            total += reached
        return total

    @property
    def first(self) -> float:
        """The probability that the first drafted token is right."""
        return self.right[0] if self.right else self._prior

    def _unknown(self) -> float:
        """Return the expected acceptance of the first place that was never reached: as of the one before."""
        return self.right[-1] if self.right else self._prior

    def judge(self, pays: bool) -> None:
        """Take note whether verifying pays."""
        self.on = pays
        if pays:
            self.off, self.wait = False, WAIT
        elif not self.off:
            self.off, self.left = True, self.wait

    @property
    def due(self) -> bool:
        """True if it has not paid for long enough to be tried again."""
        return self.off and self.left <= 0

    def retried(self) -> None:
        """Wait for longer until the next time."""
        self.wait = min(2 * self.wait, LONGEST_WAIT)
        self.left = self.wait

    def learn(self, n: int, accepted: int) -> None:
        """Record that of n drafted tokens this many were right."""
        for place in range(min(n, accepted + 1)):
            if place == len(self.right):
                self.right.append(self._unknown())
                self.rounds.append(PRIOR_ROUNDS)
            self.rounds[place] += 1
            share = max(1 / self.rounds[place], MIN_SHARE)
            self.right[place] += share * ((place < accepted) - self.right[place])
