"""Parts of the soaks: events that are spread over a time, the memory meanwhile, and outcomes that may not differ."""

from __future__ import annotations

import random
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
LIMIT = 8e6
"""Bytes by which the resident memory may grow after the warm-up."""
WARM_UP = 0.2
"""Share of the time after which memory is compared."""
STORY = "The king and the queen lived in a castle by the sea, and a fox came to see them every day. "


class Soak(ABC):
    """Something that is disturbed, with requests beside that must get the same as alone.

    Parameters
    ----------
    process : whose memory is looked at
    most_beside : requests that may run beside an event
    """

    def __init__(self, process: psutil.Process, most_beside: int):
        self.process, self._most_beside = process, most_beside
        self.events, self.survivors, self.wrong = Counter[str](), 0, list[str]()
        self.rss: list[int] = []
        self._random, self._lock = random.Random(2), threading.Lock()

    @abstractmethod
    def disturbances(self) -> Sequence[Callable[[], None]]:
        """Return the kinds of events."""

    @abstractmethod
    def compare(self) -> str:
        """Run a request; returns the difference from an undisturbed run, or nothing."""

    def run(self, events: int, seconds: float) -> None:
        """Spread events over the time, and look at the memory meanwhile."""
        began, kinds = time.monotonic(), self.disturbances()
        with ThreadPoolExecutor(self._most_beside + 2) as pool:
            for number in range(events):
                works = [self.draw(kinds), *[self._survive] * self.draw(range(self._most_beside + 1))]
                self._random.shuffle(works)
                running = [pool.submit(work) for work in works]
                time.sleep(max(began + (number + 1) * seconds / events - time.monotonic(), 0))
                for done in wait(running).done:
                    done.result()
                self.rss.append(self.process.memory_info().rss)

    def _survive(self) -> None:
        wrong = self.compare()
        with self._lock:
            self.survivors += 1
            self.wrong += [wrong] * bool(wrong)

    def draw(self, of: Sequence[T]) -> T:
        """Return one of these by chance."""
        with self._lock:
            return self._random.choice(of)

    def chance(self) -> float:
        """Return a random number from 0 to 1."""
        with self._lock:
            return self._random.random()

    def note(self, event: str, n: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self.events[event] += n

    @property
    def growth(self) -> tuple[float, float]:
        """Resident memory after the warm-up, and how much more it was at most later on, in bytes."""
        first = int(len(self.rss) * WARM_UP)
        before = statistics.median(self.rss[first : first + max(len(self.rss) // 50, 1)])
        return before, max(self.rss[first:]) - before

    def row(self) -> list[Any]:
        """Return the cells that all soaks have: survivors, wrong ones, memory, and its growth."""
        before, grown = self.growth
        return [self.survivors, len(self.wrong), f"{before / 1e6:.0f} MB", f"{grown / 1e6:.1f} MB"]
