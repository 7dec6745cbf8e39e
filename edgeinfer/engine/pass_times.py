"""Time of a prompt token and of a generated token, measured in each forward pass whatever shares it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from .token_budget import MIN_CHUNK

if TYPE_CHECKING:
    from .scheduler import Work
    from .task import Ran

SHARED_STEP = 0.5
"""Part of a token's time by which each further sequence lengthens a forward pass."""
PROMPT_WINDOW, NEW_WINDOW = 1024, 128
"""Tokens over which the means reach, about."""


class PassTimes:
    """Mean seconds of a token, as for a sequence that has the model for itself.

    Attributes
    ----------
    prompt, decode : float
        Of a prompt and of a text; 0 before anything was measured.
    """

    def __init__(self) -> None:
        self.prompt = self.decode = 0.0

    def set(self, prompt: float, decode: float) -> None:
        """Replace what was measured so far."""
        self.prompt, self.decode = prompt, decode

    def took(self, works: Items[Work], results: Items[Items[Ran]], seconds: float) -> None:
        """Record the time of a pass; a prompt in it takes what the sequences that decode leave, at least half."""
        read = sum(sum(work.counts) for work in works if work.is_prefill)
        decoding = [ran for work, found in zip(works, results, strict=True) if not work.is_prefill for ran in found]
        if any(ran.n > 1 and not ran.run.whole for ran in decoding):
            return  # tokens that are given and scored: neither a prompt nor a text
        alone = 1 + SHARED_STEP * (len(decoding) - 1) if decoding else 0.0
        if read >= MIN_CHUNK:
            each = max(seconds - alone * self.decode, 0.5 * seconds if decoding else seconds) / read
            self.prompt = _mean(self.prompt, each, read / PROMPT_WINDOW)
        elif decoding and not read:
            new = sum(1 + len(ran.chosen) + (ran.run.owner.sample.accepted if ran.run.whole else 0) for ran in decoding)
            self.decode = _mean(self.decode, seconds * len(decoding) / (new * alone), new / NEW_WINDOW)


def _mean(before: float, now: float, weight: float) -> float:
    return before + min(weight, 1.0) * (now - before) if before else now
