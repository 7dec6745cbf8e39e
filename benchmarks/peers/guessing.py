"""Speculative decoding of a replayed text, the same on every side: which guesses are right is stated, the work is done.

The standard library only, as all that workers share.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Model(NamedTuple):
    """How a worker's model is used here."""

    check: Callable[[list[int]], Any]
    """Walks over tokens and finds the likeliest one behind each of them."""
    truncate: Callable[[int], Any]
    """Keeps so many first tokens."""


def guess(model: Model, draft: Model | None, text: list[int], depth: int, guesses: int, accept: float) -> float:
    """Write a text behind its first `depth` tokens and return the seconds.

    Each round guesses some tokens, with the draft model's walks where there is one, and checks them with the last token
    in one walk. A guess is right with the probability `accept`, for each place of the text the same on every side.
    """
    model.truncate(0)
    model.check(text[:depth])
    drafted = depth
    if draft:
        draft.truncate(0)
        draft.check(text[:depth])
    place, began = depth, time.perf_counter()
    while place < len(text):
        n = min(guesses, len(text) - place - 1)
        if draft and n:
            draft.check(text[drafted : place + 1])  # what the draft has not seen, then its own guesses but the last
            for step in range(1, n):
                draft.check([text[place + step]])
        model.check(text[place : place + 1 + n])
        right = next((i for i in range(n) if random.Random(place + i).random() >= accept), n)
        if right < n:
            model.truncate(place + 1 + right)
        if draft and n:
            drafted = min(place + n, place + 1 + right)
            if drafted < place + n:
                draft.truncate(drafted)
        place += 1 + right
    return time.perf_counter() - began
