"""Number of threads for the next forward pass, and whether the caller is one of them, chosen by measured times."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeinfer.kernels import abi

CALLER_NS = 20_000_000
"""Forward passes expected to be longer leave the caller in Python's reach: it sees Ctrl-C and cancellations only
outside.
"""
TRIED_NS = 1_000_000
"""Forward passes that take longer are not tried with one thread: all barriers of a program together cost a tenth of
that.
"""
STEPS_NS = 20_000_000
"""Longest pass of several steps: shorter than the time for which a picture of a film is shown, so text comes as
smoothly."""
SMALL_BYTES = 4 << 20
"""Weights that one core reads from its cache within TRIED_NS: forward passes over them begin with one thread."""
TRIAL, UNCOUNTED = 8, 4
"""Forward passes of a trial, and how many of them do not count: threads are woken, and their caches have none of the
weights.
"""
INTERVAL, LONGEST_INTERVAL = 64, 1024
"""Forward passes until the next trial: at first, and after some futile ones."""
GAIN, LOSS, COLD_LOSS = 0.95, 1.3, 5.0
"""A trial is kept if it takes less than the first share of the other way's time. From the second on the other is tried
at once, and a trial ends; from the third on already where its forward passes do not count."""


@dataclass(slots=True)
class _Kind:
    """Measured times of passes of the same instructions over about as many tokens; index 0: one thread, 1: all of them.
    """

    mode: int
    ns: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Recent time of each way; 0 = unknown."""
    last: float = 0.0
    uncounted: int = 1
    """The next forward passes that do not count, but for a first idea of the way."""
    trial: bool = False
    left: int = TRIAL
    interval: int = INTERVAL

    def turn(self) -> None:
        """Begin a trial of the other way, or end one: go back unless it was faster."""
        if not self.trial:
            self.trial = self.ns[self.mode] < TRIED_NS
            self.left = TRIAL if self.trial else self.interval
            if self.trial:
                self._switch()
            return
        self.trial = False
        if self.ns[self.mode] < GAIN * self.ns[1 - self.mode]:
            self.interval = INTERVAL
        else:
            self._switch()
            self.interval = min(4 * self.interval, LONGEST_INTERVAL)
        self.left = self.interval

    def _switch(self) -> None:
        self.mode, self.uncounted = 1 - self.mode, UNCOUNTED

    def took(self, ns: float) -> None:
        """Record of a forward pass; one outlier moves the figure by a quarter at most."""
        mode, before, other = self.mode, self.ns[self.mode], self.ns[1 - self.mode]
        self.last, self.left = ns, self.left - 1
        counts, self.uncounted = not self.uncounted, max(0, self.uncounted - 1)
        if not counts:
            self.ns[mode] = before if before and not self.trial else ns
        elif before == 0 or (self.trial and self.left == TRIAL - UNCOUNTED - 1):
            self.ns[mode] = ns
        else:
            self.ns[mode] = before + (min(ns, 2 * before) - before) / 4
        if other and self.ns[mode] > (LOSS if counts else COLD_LOSS) * other:
            self.left = 0


class ThreadTuner:
    """Chooses for each forward pass: one thread or all, and whether the caller is thread 0 or waits for the helper.

    Both change nothing but time. Where barriers cost more than other threads save depends on the model, on the cores
    and on other load, so it is measured: a short forward pass now and then tries the other setting.

    Parameters
    ----------
    threads : int
        All that there are.
    choose : bool
        False: all of them take part in every forward pass.
    small : bool
        Begin with one thread.
    """

    def __init__(self, threads: int, choose: bool = False, small: bool = False):
        self.threads, self.choose = threads, choose
        self._first = 0 if small else 1
        self._choosing = choose and threads > 1
        self._kinds: dict[tuple[int, int, int], _Kind] = {}

    def plan(self, tokens: int, first: int = 0, stop: int = 0, steps: int = 1) -> tuple[int, bool]:
        """Return the threads of a pass of some instructions over this many tokens, and whether the caller is one of
        them.
        """
        key = tokens.bit_length(), first, stop
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(self._first if self._choosing else 1)
        if self._choosing and kind.left <= 0:
            kind.turn()
        return self.threads if kind.mode else 1, 0 < steps * kind.last < CALLER_NS

    def short(self, tokens: int, first: int, stop: int) -> bool:
        """Return whether the caller would be one of the threads of such a pass."""
        kind = self._kinds.get((tokens.bit_length(), first, stop))
        return kind is not None and 0 < kind.last < CALLER_NS

    def further(self, tokens: int, stop: int) -> int:
        """Return how many steps a forward pass of the whole program over this many tokens may take besides the
        first."""
        kind = self._kinds.get((tokens.bit_length(), 0, stop))
        return min(int(STEPS_NS / kind.last), abi.MAX_STEPS) - 1 if kind and 0 < kind.last < STEPS_NS else 0

    def took(self, ns: float, tokens: int, first: int = 0, stop: int = 0) -> None:
        """Record of how long such a forward pass, or each of its steps, took, which was planned last."""
        self._kinds[tokens.bit_length(), first, stop].took(ns)
