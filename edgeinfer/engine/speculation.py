"""How many guesses a walk checks: by what walks have taken, and by how many guesses were right.

With a guesses right on the average, a walk over g guesses gives E(g) tokens: 1, and for each guess the probability
that it and all before it are right (arXiv 2211.17192, section 3.1, which has one probability for all of them; here
each place in a guess has its own). It pays where E(g) / (draft(g) + t(1 + g)) is above 1 / t(1), in tokens a second.
t(n) and draft(g) are measured, not assumed: on processors they depend on the model, the depth and who else computes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from ..config import DEFAULT_DRAFT_TOKENS
from .completion import SpeculationReport
from .drafting import Drafter, Text

if TYPE_CHECKING:
    from ..runner import Cancellation

CHOICES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 64)
"""Guesses that are tried: with the last token of the text they fill register blocks."""
PRIOR_ROUNDS, LEAST_SHARE = 3, 0.083
"""How many rounds the drafter's own idea of its guesses counts for, and the least weight of the latest round (its
half-life is 8 rounds)."""
SLOPE = 0.08
"""Of t(n) / t(1) where nothing is known yet: low, so that it is tried."""
MARGIN = 1.05
"""Gain from which guesses are checked: the best of several noisy estimates is too good."""
WAIT, LONGEST_WAIT = 32, 4096
"""Tokens until guesses that did not pay are tried again: at first, and after many in vain."""
FIRST_WALKS = 3
"""Walks without guesses before any are checked."""
REFRESH = 64
"""Walks with guesses after which one goes without: t(1) grows with the context."""
LEAST_SECONDS = 1e-7
"""Of anything: clocks may stand still for a while."""
STEPS = 3
"""Further steps of a walk without guesses, where guesses pay: the text is looked at again behind them."""


class Times:
    """Recent seconds of walks over n tokens and of guessing n tokens, of one model; all its requests share them."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[int, float]] = {}
        self._again: set[tuple[str, int]] = set()
        """What was measured more than once."""
        self._plain: Counter[int] = Counter()

    def took(self, what: str, n: int, seconds: float) -> None:
        """Take note; what disturbs a measurement makes it longer, so shorter ones count more.

        The first one finds cold caches, and counts for nothing beside a shorter second.
        """
        seconds = max(LEAST_SECONDS, seconds)
        known = self._seconds.setdefault(what, {})
        before = known.get(n)
        if before is None:
            known[n] = seconds
        elif seconds < before:
            known[n] += (1.0 if (what, n) not in self._again else 0.3) * (seconds - before)
        else:
            known[n] += 0.15 * (min(seconds, 2 * before) - before)
        if before is not None:
            self._again.add((what, n))

    def plain(self, texts: int, seconds: float) -> None:
        """Take note of a walk over a token of each text: everything else is held against it."""
        self._plain[texts] += 1
        self.took("walk", texts, seconds)

    def known(self, texts: int) -> bool:
        """Whether enough such walks were measured; the first ones of a process find cold caches."""
        return self._plain[texts] >= FIRST_WALKS

    def walk(self, n: int) -> float | None:
        """Return the seconds of a walk over n tokens, between the nearest ones known; None where nothing is."""
        known = self._seconds.get("walk", {})
        if n in known or not known:
            return known.get(n)
        below, above = (pick((m for m in known if (m < n) == low), default=None)
                        for pick, low in ((max, True), (min, False)))
        if below is not None and above is not None:
            share = (n - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        nearest = below if below is not None else above
        assert nearest is not None
        return known[nearest] * (1 + SLOPE * (n - 1)) / (1 + SLOPE * (nearest - 1))

    def draft(self, name: str, n: int) -> float:
        """Return the seconds of guessing n tokens; 0 where nothing is known."""
        known = self._seconds.get(name, {})
        if not known or n in known:
            return known.get(n, 0.0)
        nearest = min(known, key=lambda m: abs(m - n))
        return known[nearest] * n / nearest


class _Level:
    """How many guesses of one level of a drafter are right."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self.right: list[float] = []
        """Of each place in a guess, given that those before were right."""
        self.rounds: list[int] = []
        self.wait, self.left = WAIT, 0
        self.off = False

    def expected(self, n: int) -> float:
        """Return the tokens that a walk over n guesses gives."""
        total = reached = 1.0
        for place in range(n):
            reached *= self.right[place] if place < len(self.right) else self._unknown()
            total += reached
        return total

    def _unknown(self) -> float:
        """Return what to expect of the first place that was never reached: as of the one before."""
        return self.right[-1] if self.right else self._prior

    def tried(self, pays: bool) -> bool:
        """Return whether guesses of this level are checked now: where they pay, or after they did not for a while."""
        if pays:
            self.off, self.wait = False, WAIT
        elif not self.off:
            self.off, self.left = True, self.wait
        elif self.left <= 0:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
            self.left = self.wait
            return True
        return pays

    def learn(self, n: int, accepted: int) -> None:
        """Take note that of n guesses so many were right."""
        for place in range(min(n, accepted + 1)):
            if place == len(self.right):
                self.right.append(self._unknown())
                self.rounds.append(PRIOR_ROUNDS)
            self.rounds[place] += 1
            share = max(1 / self.rounds[place], LEAST_SHARE)
            self.right[place] += share * ((place < accepted) - self.right[place])


class _Shadow(NamedTuple):
    """A guess that no walk checked: the text itself will."""

    level: _Level
    start: int
    guess: list[int]


class Speculation:
    """Guesses for one request: whether, how many, and what they gained.

    Parameters
    ----------
    drafter : guesses
    times : of the model that checks; they outlive the request
    most : guesses of a text that a walk checks at most
    rows : rows of logits of a walk
    fixed : always check `most` guesses, whatever it costs (for measurements and tests)
    """

    def __init__(self, drafter: Drafter, times: Times, most: int, rows: int, fixed: bool = False):
        self.drafter, self._times, self._rows, self._fixed = drafter, times, rows, fixed
        self._choices = (*(n for n in CHOICES if n < most), most)
        self._levels: dict[int, _Level] = {}
        self._now: list[_Level | None] = []
        """Of each text, for the next walk; None where there is nothing to guess."""
        self._shadows: dict[int, _Shadow] = {}
        self._began = self._drafting = 0.0
        self._measured = False
        """Whether the next walk goes without guesses to know how long such walks take."""
        self._unrefreshed = self._walks = self._texts = self._tokens = self._drafted = 0
        self._accepted: list[int] = []
        self._seconds = self._instead = 0.0

    # -- before a walk -----------------------------------------------------------------------------------------------

    def guesses(self, texts: Items[Text], room: int, cancel: Cancellation | None = None) -> list[list[int]]:
        """Return the guesses that the next walk is to check, up to `room` of each text; none at all: it checks nothing.
        """
        self._began = time.perf_counter()
        self._resolve(texts)
        self._drafting = 0.0
        levels = [self.drafter.level(text) for text in texts]
        for level in set(levels) - {0, *self._levels}:
            self._levels[level] = _Level(self.drafter.prior(level))
        self._now = [self._levels[level] if level else None for level in levels]
        n = self._choose(room)
        if not n:
            if self.drafter.free:
                self._watch(texts, min(room, DEFAULT_DRAFT_TOKENS))
            return []
        asked = [text for text, level in zip(texts, levels, strict=True) if level]
        began = time.perf_counter()
        self.drafter.catch_up(asked, cancel)  # reading a prompt is no part of what guesses cost from then on
        ready = time.perf_counter()
        found = iter(self.drafter.guess(asked, n, cancel))
        ended = time.perf_counter()
        self._drafting = ended - began
        guesses = [next(found) if level else [] for level in levels]
        if not any(guesses):
            return []
        self._times.took(self.drafter.name, n, ended - ready)
        return guesses

    def further(self, further: int) -> int:
        """Return how many steps a walk without guesses may go on by itself."""
        waits = any(not level.off for level in self._levels.values())
        return min(further, STEPS) if waits and not self._measured else further

    def _choose(self, room: int) -> int:
        """Return the number of guesses that gives the most tokens a second, or is due to be tried."""
        levels = [level for level in self._now if level]
        texts, most = len(self._now), min(room, (self._rows - len(self._now)) // max(len(levels), 1))
        choices = [n for n in self._choices if n <= most] if levels else []
        if self._fixed or not choices:
            return choices[-1] if choices else 0
        self._measured = not self._times.known(texts) or self._unrefreshed >= REFRESH
        plain = self._times.walk(texts)
        if self._measured or plain is None:
            return 0
        speeds = {n: self._speed(levels, n) for n in choices}
        best = max(choices, key=lambda n: speeds[n])
        pays = speeds[best] > MARGIN * texts / plain
        return best if sum([level.tried(pays) for level in levels]) else 0

    def _speed(self, levels: list[_Level], n: int) -> float:
        """Return the tokens a second that are expected of n guesses."""
        texts = len(self._now)
        tokens = texts - len(levels) + sum(level.expected(n) for level in levels)
        walk = self._times.walk(texts + n * len(levels))
        return tokens / (walk + self._times.draft(self.drafter.name, n)) if walk else 0.0

    def _watch(self, texts: Items[Text], n: int) -> None:
        """Guess all the same: what the text becomes tells whether it would have been right."""
        for text, level in zip(texts, self._now, strict=True):
            if level and n > 0 and text.index not in self._shadows:
                self._shadows[text.index] = _Shadow(level, len(text.tokens), self.drafter.guess([text], n)[0])

    def _resolve(self, texts: Items[Text]) -> None:
        """Compare guesses that were not checked with what their texts became."""
        for text in texts:
            shadow = self._shadows.get(text.index)
            if not shadow:
                continue
            became = text.tokens[shadow.start : shadow.start + len(shadow.guess)]
            right = next((i for i, (a, b) in enumerate(zip(became, shadow.guess, strict=False)) if a != b), len(became))
            if right < len(became) or len(became) == len(shadow.guess):
                shadow.level.learn(len(shadow.guess), right)
                del self._shadows[text.index]

    # -- behind a walk -----------------------------------------------------------------------------------------------

    def plain(self, n_tokens: int) -> None:
        """Take note of a walk without guesses, which gave each text so many tokens."""
        seconds = self._elapsed()
        if self._now:
            self._times.plain(len(self._now), (seconds - self._drafting) / n_tokens)
        self._unrefreshed = 0
        self._wait(n_tokens)
        self._seconds += seconds
        self._instead += seconds - self._drafting

    def checked(self, guesses: Items[list[int]], accepted: Items[int]) -> None:
        """Take note of a walk that checked guesses, of which so many of each text were right."""
        seconds, texts, drafted = self._elapsed(), len(guesses), sum(map(len, guesses))
        self._times.took("walk", texts + drafted, seconds - self._drafting)
        for level, guess, right in zip(self._now, guesses, accepted, strict=True):
            if level and guess:
                level.learn(len(guess), right)
        self._unrefreshed += 1
        self._walks += 1
        self._texts += texts
        self._tokens += texts + sum(accepted)
        self._drafted += drafted
        most = max(accepted)
        self._accepted += [0] * (most - len(self._accepted))
        for place in range(most):
            self._accepted[place] += sum(right > place for right in accepted)
        self._wait(1 + sum(accepted) // texts)
        self._seconds += seconds
        self._instead += (self._times.walk(texts) or 0.0) * (1 + sum(accepted) / texts)

    def _elapsed(self) -> float:
        return max(LEAST_SECONDS, time.perf_counter() - self._began)

    def _wait(self, n_tokens: int) -> None:
        for level in self._levels.values():
            level.left -= n_tokens

    def release(self) -> None:
        """Give back what the drafter keeps."""
        self.drafter.release()
        self._shadows.clear()

    def report(self) -> SpeculationReport:
        """Return what there was."""
        levels = self._levels.values()
        on = any(not level.off for level in levels) or self._fixed
        return SpeculationReport(
            self.drafter.name, "idle" if not levels else "on" if on else "off", self._walks, self._drafted,
            sum(self._accepted), tuple(self._accepted), self._tokens / self._texts if self._walks else None,
            self._instead / self._seconds if self._walks and self._instead else None)
