"""Times at which the tokens of a request came."""

from __future__ import annotations

import time


class TokenTimes:
    """Times of one request, by time.perf_counter().

    Attributes
    ----------
    at : list of float
        When the request was handed in, then when each token of the longest text came; tokens of one forward pass are
        spaced evenly within it.
    """

    def __init__(self) -> None:
        self.at = [time.perf_counter()]
        self._began: float | None = None

    def begin(self) -> bool:
        """Record that the request is run; returns whether this is the first time."""
        first = self._began is None
        if first:
            self._began = time.perf_counter()
        return first

    def note(self, steps: int) -> None:
        """Record that this many further steps have ended, together."""
        before = self.at[-1]
        each = (time.perf_counter() - before) / max(steps, 1)
        self.at.extend(before + each * step for step in range(1, steps + 1))

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return len(self.at) - 1

    @property
    def waited_ms(self) -> float:
        """Time until the request was run."""
        return 1000 * ((self._began or time.perf_counter()) - self.at[0])

    def figures(self, steps: int, tokens: int) -> tuple[float | None, float | None, float | None]:
        """Return ms to the first token, ms per token after it, and tokens a second after the first step.

        Parameters
        ----------
        steps : of the longest text
        tokens : that all texts together got after the first step
        """
        if not steps:
            return None, None, None
        first_ms = 1000 * (self.at[1] - self.at[0])
        if steps < 2:
            return first_ms, None, None
        seconds = self.at[steps] - self.at[1]
        return first_ms, 1000 * seconds / (steps - 1), tokens / seconds
