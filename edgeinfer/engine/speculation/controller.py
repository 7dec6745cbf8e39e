"""Controller of speculation: chooses the number of draft tokens by measured pass times and acceptance.

Verifying g drafted tokens gives E(g) tokens on average: 1, and for each drafted token the probability that it and all
before it are right (arXiv 2211.17192, section 3.1, which has one probability for all of them; here each place in a
draft has its own). It pays if E(g) is above the cost of drafting and verifying, in steps of
the same run without speculation, which takes several steps in a pass where the model is small. All costs are measured:
on processors they depend on the model, the depth and other load.

Unknown costs have to be measured by trials, and a trial may lose time. With prompt lookup a request may
lose a hundredth of its time on that, and 20 tokens of it in advance; with a drafter that the user named 4 %, and a try.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ...config import DEFAULT_DRAFT_TOKENS
from .acceptance import LONGEST_WAIT, WAIT, Level
from .costs import SHORTEST, Times
from .drafter import Drafter, Text
from .shadows import Shadows
from .usage import Usage, count_verified, usages_of

if TYPE_CHECKING:
    from ...runner import Cancellation
    from ..completion import SpeculationReport

CHOICES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 64)
"""Drafted tokens that are tried: with the last token of the text they fill register blocks."""
START_GAIN, STAY_GAIN = 1.08, 1.03
"""Expected gain from which verifying begins, and from which it continues: the best of noisy estimates is too good."""
LOSS_SHARE, FIRST_LOSS_TOKENS = 0.01, 20
"""Share of a request's time that trials may lose, and the tokens whose time counts as passed at the beginning."""
ASKED_LOSS_FACTOR = 4
"""Factor by which the allowed loss grows for a drafter that the user has chosen."""
FIRST_TRY_INDEX = 2
"""Index of the first choice that is tried for such a drafter."""
SAVED_TOKENS = 8
"""Tokens whose time may be lost again from the gains of speculation."""
REFRESH_PASSES = 32
"""Number of verifying passes before one without drafts: the cost of a token changes with context and machine."""
READING_SHARE = 0.5
"""Share of a draft model's expected gain that reading the prompt may cost."""
HORIZON_TOKENS = 256
"""Most tokens over which it must gain that: the length of a text is not known."""
MIN_SECONDS = 1e-7
"""Least time of any step: clocks may stand still for a while."""
LONGEST_GAP_SECONDS = 3e-4
"""Seconds between two steps that count; in a longer gap the caller was busy with the text."""


class Speculation:
    """Speculation in the requests that run together: whether to draft, how many tokens, and the gain.

    One decision holds for all texts of a forward pass, because its cost is that of the whole pass.

    Parameters
    ----------
    drafter : drafts
    times : of the model that verifies; they outlive the request
    most : drafted tokens of a text that a pass verifies at most
    rows : rows of logits of a pass
    fixed : always verify `most` tokens, whatever it costs (for measurements and tests)
    asked : the user has chosen this drafter, and it may lose more until it is known not to pay

    Attributes
    ----------
    key : requests whose keys are equal can share one
    idle : nothing is drafted any more
    """

    def __init__(self, drafter: Drafter, times: Times, most: int, rows: int, fixed: bool = False, asked: bool = False):
        self.drafter, self._times, self._rows, self._fixed, self._asked = drafter, times, rows, fixed, asked
        self.key = drafter.name, most, rows, fixed, asked
        self._choices = (*(n for n in CHOICES if n < most), most)
        self._may_rest = not (asked or fixed)
        self._loss = LOSS_SHARE * (ASKED_LOSS_FACTOR if asked else 1)
        self._levels: dict[int, Level] = {}
        self._now: list[Level | None] = []
        """Levels of the drafts of each text for the next pass; None if there is nothing to draft."""
        self._writing: Items[Text] = ()
        self._shadows = Shadows()
        self._costs, self._depth = times.of(1), 0
        self._began = self._ended = self._reading = self._drafting = 0.0
        self._rest, self._resting = 0, WAIT
        self.idle = self._measuring = False
        self._plain_passes = self._unrefreshed = self._passes = 0
        self._seconds = self._lost = 0.0

    # -- before a pass -----------------------------------------------------------------------------------------------

    def proposals(self, texts: Items[Text], left: int, cancel: Cancellation | None = None,
                  room: Callable[[], int] | None = None, each: bool = False,
                  drafting: Items[bool] = ()) -> list[list[int]]:
        """Return the drafts that the next pass is to verify; none at all: it verifies nothing.

        Parameters
        ----------
        texts : that continue
        left : tokens that each may be given at most, besides one
        cancel : ends drafting
        room : returns how many of them the next pass can take
        each : without drafts a pass takes one step, because every row is requested
        drafting : for each text whether it is drafted for; by default all are
        """
        now = time.perf_counter()
        self._writing = texts
        self._began = max(self._ended, now - LONGEST_GAP_SECONDS) if self._ended else now
        self._reading = self._drafting = 0.0  # the time of looking at the text counts as drafting
        self._measuring = self._rest <= 0
        if not self._measuring:
            return []
        self._costs, self._depth = self._times.of(len(texts), each), len(texts[0].tokens)
        if not (self._fixed or self._ready()):
            self._now = []
            return []
        found = self._proposals(texts, left, cancel, room, drafting or (True,) * len(texts))
        if not found:
            self._drafting = max(0.0, time.perf_counter() - now)
        return found

    def _ready(self) -> bool:
        """Return whether costs are known to compare with, and a gain is possible."""
        self.idle = self._may_rest and self._costs.short(self._depth)
        return not self.idle and bool(self._costs.known and self._plain_passes and self._costs.reaches(self._depth))

    def _proposals(self, texts: Items[Text], left: int, cancel: Cancellation | None,
                   room: Callable[[], int] | None, drafting: Items[bool]) -> list[list[int]]:
        self._shadows.resolve(texts)
        levels = [self.drafter.level(text) if drafted else 0 for text, drafted in zip(texts, drafting, strict=True)]
        for level in set(levels) - {0, *self._levels}:
            learned = () if self.drafter.free else self._times.right.get(self.drafter.name, ())
            self._levels[level] = Level(self.drafter.prior(level), learned)
        self._now = [self._levels[level] if level else None for level in levels]
        n = self._choose(texts, left, room) if any(levels) else 0
        if not n:
            if self.drafter.free:
                self._shadows.watch(self.drafter, texts, self._now, min(left, DEFAULT_DRAFT_TOKENS))
            return []
        asked = [text for text, level in zip(texts, levels, strict=True) if level]
        unread = self.drafter.unread(asked)
        began = time.perf_counter()
        self.drafter.catch_up(asked, cancel)  # reading a prompt is not part of the cost of later drafts
        ready = time.perf_counter()
        found = iter(self.drafter.propose(asked, n, cancel))
        ended = time.perf_counter()
        proposals = [next(found) if level else [] for level in levels]
        self._reading, self._drafting = max(0.0, ready - began), max(0.0, ended - ready)
        step = self._costs.token(self._depth) if self._costs.plain_passes else 0.0
        if step and unread > n:
            self._costs.took(f"{self.drafter.name}, reading", 1, self._reading / unread / step)
        if not any(proposals):
            return []
        if step and not self.drafter.free:
            self._costs.took(self.drafter.name, n, self._drafting / step)
        return proposals

    def _choose(self, texts: Items[Text], left: int, room: Callable[[], int] | None) -> int:
        """Return how many tokens to draft: the number that gives most for its cost, or is due to be tried."""
        levels = [level for level in self._now if level]
        most = min(left if room is None else min(left, room()), (self._rows - len(self._now)) // len(levels))
        choices = [n for n in self._choices if n <= most]
        if self._fixed or not choices:
            return choices[-1] if choices else 0
        if self._unrefreshed >= REFRESH_PASSES:
            return 0
        if self._asked and not self._passes:  # the cost of a drafter that was named is measured once in a request
            return choices[min(FIRST_TRY_INDEX, len(choices) - 1)]
        gains = {n: self._gain(levels, n) for n in choices}
        margin = STAY_GAIN if any(level.on for level in levels) else START_GAIN
        pays = [n for n in choices if gains[n] > margin]
        for level in levels:
            level.judge(bool(pays))
        if not pays:
            pays = self._due(levels, choices)
        allowed = [n for n in pays if self._risk(levels, n) <= self._allowed()]
        if not allowed or not self._worth_reading(texts, max(gains[n] for n in allowed), left):
            return 0
        for level in levels:
            if level.due:
                level.retried()
        return max(allowed, key=lambda n: gains[n])

    def _due(self, levels: list[Level], choices: list[int]) -> list[int]:
        """Return the numbers to try although they are not expected to pay; or rest."""
        if not any(level.due for level in levels):
            if all(self._gain(levels, n, perfect=True) < START_GAIN for n in choices):  # no text would make it pay
                self._pause()
            return []
        found = [n for n in choices if not self.drafter.free or self._gain(levels, n, doubting=True) > START_GAIN]
        if not found:
            for level in levels:
                level.retried()
        return found

    def _pause(self) -> None:
        """Do not look at the text for a while, and for longer the next time."""
        self._rest, self._resting = self._resting, min(2 * self._resting, LONGEST_WAIT)
        self._plain_passes = 0  # costs measured before a rest may be of another depth, or another minute
        self._shadows.clear()

    def _gain(self, levels: list[Level], n: int, perfect: bool = False, doubting: bool = False) -> float:
        """Return the tokens that are expected of verifying n drafted ones, over those in the same time without."""
        texts = len(self._now)
        tokens = texts - len(levels) + sum(1 + n if perfect else level.expected(n) for level in levels)
        return tokens / texts / self._cost(levels, n, doubting)

    def _cost(self, levels: list[Level], n: int, doubting: bool = False) -> float:
        drafting = self._costs.draft(self.drafter.name, n, self._depth, self.drafter.free)
        return drafting + self._costs.verify(len(self._now) + n * len(levels), self._depth, doubting)

    def _risk(self, levels: list[Level], n: int) -> float:
        """Return the steps without speculation that are lost where the first drafted token is wrong, times the
        probability of that; and until costs are measured, the loss if they are far above the assumed ones."""
        doubt = 1.0 if self._asked else self._costs.doubt(self.drafter.name, self.drafter.free)
        wrong, cost = 1 - sum(level.first for level in levels) / len(levels), doubt * self._cost(levels, n)
        tokens = sum(level.expected(n) for level in levels) / len(levels)
        return wrong * (cost - 1) + (max(0.0, cost - tokens) if doubt > 1 else 0.0)

    def _allowed(self) -> float:
        """Return how many steps without speculation may be lost now."""
        step = self._costs.token(self._depth)
        return self._loss * (self._seconds / step + FIRST_LOSS_TOKENS) - self._lost / step

    def _worth_reading(self, texts: Items[Text], gain: float, left: int) -> bool:
        """Return whether a drafter that has to read a prompt first is expected to save as much."""
        unread = self.drafter.unread(texts)
        if unread <= max(self._choices):
            return True
        cost = unread * self._costs.read(self.drafter.name)
        return cost < READING_SHARE * (1 - 1 / max(gain, 1)) * min(left, HORIZON_TOKENS)

    # -- after a pass -----------------------------------------------------------------------------------------------

    def plain(self, n_tokens: int) -> None:
        """Record of a pass without drafts, which gave each text this many tokens."""
        seconds = self._elapsed()
        if not self._measuring:
            self._passed(n_tokens, seconds, seconds)
            return
        alone = max(MIN_SECONDS, seconds - self._drafting - self._reading)
        if self._costs.plain(self._depth, n_tokens, alone):
            self._plain_passes += 1
            self._unrefreshed = 0
            self.idle = self._may_rest and n_tokens > 1 and alone < SHORTEST * n_tokens
            if self.idle and not self._passes:  # there is no gain to state
                return
        self._passed(n_tokens, seconds, alone)
        if self._rest <= 0 and self._now and self._costs.plain_passes and self._allowed() < 0:
            self._pause()  # looking at the text costs too much of such short steps

    def verified(self, proposals: Items[list[int]], accepted: Items[int]) -> None:
        """Record a pass that verified drafts, and how many tokens of each text were right."""
        seconds, texts, drafted = self._elapsed(), len(proposals), sum(map(len, proposals))
        step = self._costs.token(self._depth) if self._costs.plain_passes else 0.0
        verifying = seconds - self._reading - (0.0 if self.drafter.free else self._drafting)
        if step:
            self._costs.took("verify", texts + drafted, max(MIN_SECONDS, verifying) / step)
        for level, proposal, right in zip(self._now, proposals, accepted, strict=True):
            if level and proposal:
                level.learn(len(proposal), right)
        self._unrefreshed += 1
        self._passes += 1
        count_verified(self._writing, proposals, accepted)
        self._passed(1 + sum(accepted) // texts, seconds, step * (1 + sum(accepted) / texts))

    def _passed(self, n_tokens: int, seconds: float, instead: float) -> None:
        """Record of the seconds of a pass, and of how many the same tokens take without speculation."""
        self._rest -= n_tokens
        for level in self._levels.values():
            level.left -= n_tokens
        self._seconds += seconds
        for usage in usages_of(self._writing):
            usage.seconds += seconds
            usage.instead += instead
        if instead:
            step = instead / n_tokens
            self._lost = max(-SAVED_TOKENS * step, self._lost + seconds - self._reading - instead)
        self._ended = time.perf_counter()

    def _elapsed(self) -> float:
        return max(MIN_SECONDS, time.perf_counter() - self._began)

    def release(self, texts: Items[Text]) -> None:
        """Release the drafter's state of texts that have ended, or whose sequences are taken away."""
        self.drafter.release(texts)
        for text in texts:
            self._shadows.forget(text)
        for level in self._levels.values():
            if level.right and not self.drafter.free:
                self._times.right[self.drafter.name] = list(level.right)

    def report(self, usage: Usage) -> SpeculationReport:
        """Return the statistics of a request."""
        levels = self._levels.values()
        on = any(not level.off for level in levels) or self._fixed
        return usage.report(self.drafter.name, "idle" if not levels else "on" if on else "off")
