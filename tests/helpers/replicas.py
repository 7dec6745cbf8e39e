"""Replicas within this process, which can be lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from edgeinfer import LLM
from edgeinfer.cluster import RemoteModel
from edgeinfer.cluster.handing import Handing, Piece
from edgeinfer.cluster.job import Done, Identity, Item, Job, Part, Prefilled, Speeds, WorkerLost
from edgeinfer.cluster.serving import Serving, facts_of

OPTIONS: dict[str, Any] = dict(ctx=512, threads=1, max_sequences=8, max_queue=256)


class Within:
    """A replica that has a model in this process.

    Attributes
    ----------
    lost_after : callable or None
        Gets a job and the tokens sent, and says whether the replica is lost now; asked before each token, so that a
        replica whose tokens come all at once is lost after the same one.
    jobs : list of Job
        Those it was given.
    """

    def __init__(self, source: str, name: str, arithmetic: str = "", reopens: bool = True, **options: Any):
        self.llm, self.name, self.reopens = LLM(source, **OPTIONS | options), name, reopens
        self._serving, self.facts = Serving(self.llm), facts_of(self.llm)
        self._measured = self.facts.speeds
        if arithmetic:
            self.facts = self.facts._replace(identity=Identity("1", "b", arithmetic), isa=arithmetic)
        self.lost_after: Callable[[Job, int], bool] | None = None
        self.jobs, self.prompts = list[Job](), list[Job]()
        self.back, self.idle_end = threading.Event(), threading.Event()
        self.back.set()

    async def run(self, job: Job) -> AsyncIterator[Item]:
        self.jobs.append(job)
        sent = 0
        try:
            async for whole in self._serving.run(job):
                for item in apart(whole) if self.lost_after else [whole]:
                    if self.lost_after and self.lost_after(job, sent):
                        raise WorkerLost("killed")
                    sent += sum(len(part.ids) for part in item) if isinstance(item, list) else 0
                    yield item._replace(speeds=self._told(item.speeds)) if isinstance(item, Done) else item
        finally:
            self._serving.cancel(job.key)

    async def prefill(self, job: Job) -> Sender | None:
        self.prompts.append(job)
        if self.lost_after and self.lost_after(job, 0):
            raise WorkerLost("killed")
        return Sender(self._serving.handing, job.key) if self._serving.prefill(job) else None

    async def prefilled(self, key: int) -> Prefilled | None:
        found = await self._serving.prefilled(key)
        return found and found._replace(speeds=self._told(found.speeds))

    def _told(self, speeds: Speeds | None) -> Speeds | None:
        """Return what it tells of its speeds: nothing if a test has made up others."""
        return speeds if self.facts.speeds == self._measured else None

    async def cancel(self, key: int) -> None:
        self._serving.cancel(key)

    async def ended(self) -> WorkerLost:
        while not self.idle_end.is_set():
            await asyncio.sleep(0.01)
        self.idle_end.clear()
        return WorkerLost("killed")

    async def reopen(self) -> None:
        while not self.back.is_set():
            await asyncio.sleep(0.01)
        if not self.reopens:
            raise WorkerLost("no such node")

    @property
    def free(self) -> bool:
        return self.llm.state().kv_usage == 0 and not self._serving._running


def apart(item: Item) -> Iterator[Item]:
    """Yield the tokens of an item one by one, and its end without any."""
    for part in item if isinstance(item, list) else item.parts if isinstance(item, Done) else ():
        for i in range(len(part.ids) - 1):
            yield [Part(part.number, part.pieces[i:i + 1], part.ids[i:i + 1], part.logprobs[i:i + 1], "", None, None)]
        last = max(len(part.ids) - 1, 0)
        yield [part._replace(pieces=part.pieces[last:], ids=part.ids[last:], logprobs=part.logprobs[last:])]
    if not isinstance(item, list):
        yield item._replace(parts=()) if isinstance(item, Done) else item


class Sender:
    """Hands a prompt over within the process."""

    def __init__(self, handing: Handing, key: int):
        self._handing, self._key = handing, key

    async def piece(self, offset: int) -> Piece:
        if (found := await self._handing.piece(self._key, offset)) is None:
            raise WorkerLost("it has no such prompt")
        return found


def opener(replicas: list[Within], said: list[str], helping: int = 0) -> Callable[[str, int | None], Any]:
    """Return a function that opens a model on these replicas."""
    def close() -> None:
        for one in replicas:
            one.llm.close()

    def opened(source: str, left: int | None) -> Any:
        return RemoteModel(source, list(replicas), 256, said.append, close, helping=helping)

    return opened


def recorded(llm: LLM) -> list[tuple[float, float]]:
    """Return a list that gets the times of a prompt token and of a generated one after each pass from now on."""
    times: Any = llm.pass_times
    seen, took = [(times.prompt, times.decode)], times.took

    def noted(*how: Any) -> None:
        took(*how)
        seen.append((times.prompt, times.decode))

    times.took = noted
    return seen
