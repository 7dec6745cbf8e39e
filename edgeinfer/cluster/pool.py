"""A pool of workers (not of KV blocks) that answer rows of a batch, and the rows of workers that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..errors import EdgeInferError
from .job import NotBegun, WorkerLost
from .lost import Losses, Reopened

if TYPE_CHECKING:
    from ..server import Answered, Row

TRIES = 5
"""Most workers lost with one row before the run ends: the row may be the cause."""


class Worker(Reopened, Protocol):
    """A process that holds the model."""

    async def post(self, url: str, body: bytes) -> Answered:
        """Return the answer to a request; raises `WorkerLost`."""


class _Place:
    """A worker with its rows."""

    def __init__(self, worker: Worker):
        self.process, self.last = worker, b""
        self.n = self.n_given = 0
        self.there = True
        self.reopening: asyncio.Task[None] | None = None

    def lose(self) -> None:
        """Note that it is gone with its prefix cache."""
        self.there, self.last = False, b""


class Pool:
    """Distributes rows over workers, and retries the rows of a lost worker on others.

    A row goes to the worker whose latest row shares the longest prefix with it, unless that worker is full; without a
    shared prefix, to the worker with the fewest rows.

    Parameters
    ----------
    workers : at least one
    at_once : most rows of a worker at a time
    say : called with a sentence for each worker that is lost or returns
    """

    def __init__(self, workers: Sequence[Worker], at_once: int, say: Callable[[str], object]):
        self._places = [_Place(one) for one in workers]
        self._at_once, self._losses = at_once, Losses(say)

    async def post(self, row: Row, body: bytes) -> Answered:
        """Return the answer to a row; raises `EdgeInferError` if no worker is left, or each is lost with this row."""
        tries = 0
        while tries < TRIES:
            place = await self._taken(row.key)
            try:
                return await place.process.post(row.url, body)
            except WorkerLost as error:
                self._losses.lose(place, error)
                tries += not isinstance(error, NotBegun)
            finally:
                place.n -= 1
                await self._losses.notify()
        raise EdgeInferError(f"{TRIES} workers ended while they had line {row.number} of the input; remove that "
                             "line, or lower --max-sequences or --budget if they had too little memory.")

    async def close(self) -> None:
        """End tasks that wait for workers."""
        for place in self._places:
            if place.reopening is not None:
                place.reopening.cancel()
        await asyncio.gather(*(one.reopening for one in self._places if one.reopening), return_exceptions=True)

    async def _taken(self, key: bytes) -> _Place:
        """Wait for a free worker, and take a place there."""
        async with self._losses.changed:
            while True:
                free = [one for one in self._places if one.there and one.n < self._at_once]
                if free:
                    break
                if not any(one.there or one.reopening for one in self._places):
                    raise EdgeInferError("No worker is left; the same command continues from the existing "
                                         "answers.")
                await self._losses.changed.wait()
            place = max(free, key=lambda one: (in_common(one.last, key), -one.n, -one.n_given))
            place.last = key
            place.n += 1
            place.n_given += 1
            return place


def in_common(one: bytes, other: bytes) -> int:
    """Return how many first bytes agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
