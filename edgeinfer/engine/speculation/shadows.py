"""Drafts that no pass verifies: the texts themselves show later whether they would have been right."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from .acceptance import Level
from .drafter import Drafter, Text


class Shadow(NamedTuple):
    """A draft that no pass verified."""

    level: Level
    start: int
    proposal: list[int]


class Shadows:
    """Drafts that no pass verifies, at most one for each text, to learn acceptance while verifying does not pay."""

    def __init__(self) -> None:
        self._of: dict[int, Shadow] = {}

    def watch(self, drafter: Drafter, texts: Items[Text], levels: Items[Level | None], n: int) -> None:
        """Draft n tokens for each text with a level that has no such draft yet."""
        for text, level in zip(texts, levels, strict=True):
            if level and n > 0 and text.key not in self._of:
                self._of[text.key] = Shadow(level, len(text.tokens), drafter.propose([text], n)[0])

    def resolve(self, texts: Items[Text]) -> None:
        """Compare the drafts with the texts' actual tokens."""
        for text in texts:
            shadow = self._of.get(text.key)
            if not shadow:
                continue
            became = text.tokens[shadow.start : shadow.start + len(shadow.proposal)]
            right = next((i for i, (a, b) in enumerate(zip(became, shadow.proposal, strict=False)) if a != b),
                         len(became))
            if right < len(became) or len(became) == len(shadow.proposal):
                shadow.level.learn(len(shadow.proposal), right)
                del self._of[text.key]

    def forget(self, text: Text) -> None:
        """Forget the draft of a text that has ended."""
        self._of.pop(text.key, None)

    def clear(self) -> None:
        """Forget all drafts."""
        self._of.clear()
