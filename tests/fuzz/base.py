"""Common parts of the targets, and the small models that they damage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.runner import Runner
from edgeinfer.runtime import Session

PROMPT = [5, 17, 80, 3, 42, 61, 12]
N_TOKENS = 3


class WrongTokensError(Exception):
    """A case was accepted, and its result differs from the model's."""


class Target:
    """One thing that edgeinfer reads.

    Attributes
    ----------
    weight : float
        How often it is picked; dear cases less often than cheap ones.
    input_bytes, plan_bytes : int
        Of the case that ran, for the bound of its memory.
    """

    weight: ClassVar[float] = 1.0

    def __init__(self, directory: Path):
        self.directory = directory
        self.input_bytes = self.plan_bytes = 0

    def run(self, rng: random.Random) -> bool:
        """Run one case; True if it was accepted. Errors of ours are refusals, all others are findings."""
        raise NotImplementedError

    def canary(self) -> None:
        """Raise where a sound model no longer gives its own tokens."""


def well_told(message: str) -> bool:
    """Return whether this is something to show: one line, printable, of a length that a person reads."""
    return bool(message) and message.isprintable() and len(message) < 2000


def greedy(session: Runner, prompt: list[int] | None = None, n: int = N_TOKENS) -> list[int]:
    """Return the likeliest n tokens after a prompt."""
    sequence = session.new_sequence()
    try:
        ids = [int(session.prefill(sequence, prompt or PROMPT).argmax())]
        while len(ids) < n:
            ids.append(int(session.decode([sequence], [ids[-1]])[0].argmax()))
    finally:
        session.release(sequence)
    return ids


def tokens_of(path: Path, target: Target | None = None) -> list[int]:
    """Open a bundle and return its first tokens."""
    with Bundle.open(path) as bundle:
        session = Session(bundle, RuntimeConfig(ctx=64, threads=1, prefill_chunk=16, budget_bytes=400_000_000))
        try:
            if target:
                target.plan_bytes = session.plan.total_bytes
            return greedy(session)
        finally:
            session.close()
