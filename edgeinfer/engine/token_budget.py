"""Size of a step: how many prompt tokens fit beside the decoding sequences within the time that users wait for one, and
whose they are."""

from __future__ import annotations

MAX_ITL = 0.2
"""Seconds between two tokens of a text that the prompts of other requests may cause."""
SHARE = 0.25
"""Weight of the latest measurement."""
FIRST_CHUNK = 16
"""Prompt tokens of a mixed step before anything was measured."""
MIN_CHUNK, MAX_SMALLEST = 8, 16
"""Prompt tokens of any mixed step at least, and where eight sequences or more decode: half a tile of the kernels, and
a tile, because a crowd that waits for its prompts costs more time than longer steps do."""
DEVIATIONS = 1
"""Mean deviations by which a prompt token is expected to take longer than on average."""

AGING_SECONDS = 1.0
"""A prompt that waits so long overtakes one of half its length."""


class TokenBudget:
    """Times of forward passes, by their tokens.

    Parameters
    ----------
    max_itl : longest time between two tokens of a sequence that prompts of others may cause, in seconds
    most_tokens : of a forward pass
    """

    def __init__(self, max_itl: float, most_tokens: int):
        self.max_itl, self._most = max_itl, most_tokens
        self._decode: dict[int, float] = {}
        """Seconds of a step by the number of sequences that decode."""
        self._prompt = 0.0
        """Seconds of a prompt token beside others; 0 before it was measured."""
        self._deviation = 0.0
        """Mean deviation of its measurements."""

    def prompt_tokens(self, decoding: int) -> int:
        """Return how many prompt tokens the next step may have beside this many decoding sequences."""
        if not decoding:
            return self._most
        if not self._prompt:
            return min(FIRST_CHUNK, self._most)
        fitting = int((self.max_itl - self._decode_seconds(decoding)) / (self._prompt + DEVIATIONS * self._deviation))
        least = min(max(2 * decoding, MIN_CHUNK), MAX_SMALLEST)
        return min(max(fitting, least), self._most)

    def took(self, decoding: int, prompt: int, seconds: float) -> None:
        """Record the time of a step over this many decoding sequences and prompt tokens."""
        if not prompt:
            self._decode[decoding] = _blend(self._decode.get(decoding, 0.0), seconds)
        elif prompt >= MIN_CHUNK:
            each = max(seconds - self._decode_seconds(decoding), 0.5 * seconds if decoding else seconds) / prompt
            if self._prompt:
                self._deviation += SHARE * (abs(each - self._prompt) - self._deviation)
            self._prompt = _blend(self._prompt, each)

    def _decode_seconds(self, decoding: int) -> float:
        """Return the seconds of a step of this many sequences: as measured with the nearest number of them."""
        if not decoding or not self._decode:
            return 0.0
        return self._decode[min(self._decode, key=lambda n: abs(n - decoding))]


def urgency(tokens: int, waited: float) -> float:
    """Return the rank of a prompt, lowest first: half the length counts as much as a second of waiting."""
    return tokens.bit_length() - waited / AGING_SECONDS


def _blend(before: float, now: float) -> float:
    return before + SHARE * (now - before) if before else now
