"""Opens lost processes of a model again, and tells callers that wait for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from .job import WorkerLost


class Reopened(Protocol):
    """A process that can be opened again."""

    name: str

    async def reopen(self) -> None:
        """Return once it answers again after it was lost; raises `WorkerLost` if it does not."""


class Place(Protocol):
    """A process and its state."""

    there: bool
    reopening: asyncio.Task[None] | None

    @property
    def process(self) -> Reopened:
        """The process."""

    def lose(self) -> None:
        """Record its loss, with its rows or requests."""


class Losses:
    """Opens processes again.

    Parameters
    ----------
    say : gets a sentence for each process that is lost or comes back

    Attributes
    ----------
    changed : asyncio.Condition
        Notified when a process is back or given up.
    """

    def __init__(self, say: Callable[[str], object]):
        self._say, self.changed = say, asyncio.Condition()

    def lose(self, place: Place, why: WorkerLost) -> None:
        """Note that a process is lost, and begin to open it again."""
        if place.there:
            place.lose()
            self._say(f"{place.process.name} is lost ({why}); others continue its requests.")
            place.reopening = asyncio.ensure_future(self._reopen(place))

    async def _reopen(self, place: Place) -> None:
        try:
            await place.process.reopen()
            place.there = True
            self._say(f"{place.process.name} is back.")
        except WorkerLost as error:
            self._say(f"{place.process.name} does not come back ({error}).")
        finally:
            place.reopening = None
            with contextlib.suppress(asyncio.CancelledError):
                await self.notify()

    async def notify(self) -> None:
        """Let those look again that wait for a process."""
        async with self.changed:
            self.changed.notify_all()
