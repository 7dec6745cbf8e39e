"""A replica in the front end's records: its load, and what it received."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ..config import CPU
from .job import Done, Prefilled, Replica
from .router import Load

UNUSED = 10.0
"""Factor by which a prompt that came to nothing slows the way by which it was to come."""


class Place(Load):
    """A replica with its load and history.

    Attributes
    ----------
    helps : bool
        Whether it computes prompts for others.
    received_bytes, expected_bytes : int
        KV blocks that came from others, and the number planned.
    """

    def __init__(self, replica: Replica, helps: bool):
        super().__init__(replica.name, replica.facts)
        self.process, self.helps = replica, helps
        self.received_bytes = self.expected_bytes = 0
        self.reopening: asyncio.Task[None] | None = None

    def received(self, done: Done, computed: Prefilled | None, prompt: int) -> Done:
        """Record how a prompt was obtained; returns the end of its request with the number of tokens cached
        elsewhere."""
        if computed is None:
            return done
        if not done.received_bytes:
            self.learn_link(UNUSED * self.speeds.link)
            return done
        self.received_bytes += done.received_bytes
        self.expected_bytes += self.facts.plan.sequence_bytes(prompt - 1)
        self.learn_link(done.received_seconds / done.received_bytes)
        return done._replace(cached_tokens=computed.cached_tokens)

    def cancel(self, key: int) -> None:
        """End a job there, and wait for nothing."""
        cancelling = asyncio.ensure_future(self.process.cancel(key))
        cancelling.add_done_callback(lambda done: done.cancelled() or done.exception())


class Taken(NamedTuple):
    """A replica that is given a request, and the name that it has there."""

    place: Place
    key: int
    helper: Place | None
    """The one that computes the prompt, if that pays."""

    @property
    def unlike(self) -> bool:
        """Whether that one is on a device, whose K and V have other bits."""
        return self.helper is not None and self.helper.facts.device != CPU

    def header(self, home: str) -> str:
        """Return the answer's header about its arithmetic; empty where that is the arithmetic of most replicas."""
        parts = [self.place.facts.isa] if self.place.facts.identity.arithmetic != home else []
        if self.unlike and self.helper is not None:
            parts.append(f"{self.helper.facts.isa} (prompt)")
        return ", ".join(parts)
