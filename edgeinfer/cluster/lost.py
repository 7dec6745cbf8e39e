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


class Endable(Reopened, Protocol):
    """A process that tells of its end."""

    async def ended(self) -> WorkerLost:
        """Return once it is lost."""


class Watched(Place, Protocol):
    """Such a process and its state."""

    @property
    def process(self) -> Endable:
        """The process."""


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

    async def watch(self, place: Watched) -> None:
        """Note each loss of a process, whether it has requests or none, until it does not come back."""
        while place.there or place.reopening is not None:
            if place.there:
                self.lose(place, await place.process.ended())
            async with self.changed:
                await self.changed.wait_for(lambda: place.there or place.reopening is None)

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
