"""The engine of a front end: it sends requests to replicas, and retries those of a lost replica on another."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from ..config import CPU
from ..errors import ClosedError, EdgeInferError, QueueFullError
from .job import Done, Facts, Failed, Item, Job, NotBegun, Prefilled, Replica, WorkerLost
from .lost import Losses
from .place import Place, Taken
from .router import Need, apart, blocks_of, choose

if TYPE_CHECKING:
    from ..engine import Request

TRIES = 5
"""Replicas that may be lost one after the other with a request that gets no further: it may be the cause."""
CLOSED = "The model was closed; open it again."
HEADER = "edgeinfer-arithmetic"
"""Header of answers whose bits are not those of most replicas, or whose prompt goes to a device."""


class RemoteEngine:
    """Runs requests on replicas; it has the part of `Engine` that clients of a server use.

    All its work is in the loop that calls `submit`.

    Parameters
    ----------
    replicas : at least one
    max_queue : requests that may wait
    say : gets a sentence for each replica that is lost or comes back
    helping : number of first replicas that compute prompts for the others, and answer if none of these is there
    """

    inside = False

    def __init__(self, replicas: Sequence[Replica], max_queue: int, say: Callable[[str], object], helping: int = 0):
        self.places = [Place(one, i < helping) for i, one in enumerate(replicas)]
        answering = [one.facts for one in self.places if not one.helps]
        self.runner = min(answering, key=lambda facts: facts.plan.kv_blocks)
        self.home = _home(answering)
        self.process, self.closed, self.preemptions, self.kv_usage = os.getpid(), False, 0, 0.0
        self._most = max_queue + sum(int(one.facts.config.max_sequences) for one in replicas)
        self._losses, self._keys, self._tasks = Losses(say), count(), set[asyncio.Task[None]]()
        self._prefills = set[asyncio.Task[Prefilled | None]]()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def n_running(self) -> int:
        """Requests that replicas have and can run together."""
        return sum(min(len(one.work), int(one.facts.config.max_sequences)) for one in self.places if not one.helps)

    @property
    def n_waiting(self) -> int:
        """Requests that wait, here or at their replica."""
        return len(self._tasks) - self.n_running

    def check_open(self) -> None:
        """Raise `ClosedError` once the engine is closed."""
        if self.closed:
            raise ClosedError(CLOSED)

    def check_outside(self) -> None:
        """Requests may be made from everywhere."""

    def submit(self, request: Request[Any]) -> None:
        """Let a request run.

        Raises
        ------
        ClosedError
            The engine was closed.
        QueueFullError
            As many requests wait as may.
        """
        self.check_open()
        if len(self._tasks) >= self._most:
            raise QueueFullError(f"{self.n_waiting} requests are waiting for this model, the maximum (max_queue); "
                                 "retry later.")
        request.task.arrive()
        if not request.claim():
            return
        self._watches = self._watches or [asyncio.ensure_future(self._losses.watch(one)) for one in self.places]
        need = self._need(request)
        taken = self._taken(need, None, _may_go_apart(request), _may_go_to_device(request))
        task = asyncio.get_running_loop().create_task(self._work(request, need, taken))
        request.task.on_cancel = lambda: _cancel(task)  # type: ignore[attr-defined]
        if taken is not None and (said := taken.header(self.home)):
            request.headers = {HEADER: said}
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    run = submit
    """Nothing runs in the client's thread."""

    def cancel(self) -> None:
        """Cancel all requests; from any thread."""
        for task in tuple(self._tasks):
            _cancel(task)

    def close(self) -> None:
        """End all requests, and wait for no replica; from any thread."""
        self.closed = True
        self.cancel()
        for task in (*self._watches, *(one.reopening for one in self.places)):
            if task is not None:
                _cancel(task)

    def _need(self, request: Request[Any]) -> Need:
        task = request.task
        blocks = blocks_of(task.prompt_ids, request.salt) if request.reuse else []
        return Need(blocks, len(task.prompt_ids), getattr(task, "room", 0))

    def _taken(self, need: Need, arithmetic: str | None, apart_: bool, device: bool) -> Taken | None:
        """Take the best replica that answers, or None if there is none.

        It is one of an arithmetic; without one of that of most replicas, and of another if none of these is there. Its
        prompt may be computed `apart_`, on a `device` too.
        """
        present = [one for one in self.places if one.there]
        there = [one for one in present if not one.helps] or [one for one in present if one.facts.device == CPU]
        own = [one for one in there if one.facts.identity.arithmetic == (arithmetic or self.home)]
        if not (among := own or (there if arithmetic is None else [])):
            return None
        place, key = choose(among, need), next(self._keys)
        assert isinstance(place, Place)
        helpers = [one for one in present if one.helps and one is not place and one.facts.may_compute_for(place.facts)
                   and (device or one.facts.device == CPU)] if apart_ else []
        helper = apart(place, helpers, need)
        assert helper is None or isinstance(helper, Place)
        taken = Taken(place, key, helper)
        place.begin(key, need, keeps=not taken.unlike)
        if helper is not None:
            place.work[key][0] = 0
            helper.begin(key, need._replace(new=0))
        return taken

    async def _awaited(self, need: Need, arithmetic: str, request: Request[Any]) -> Taken:
        """Take the best replica of an arithmetic, and wait for one that starts again where there is no other."""
        async with self._losses.changed:
            apart_, device = _may_go_apart(request), HEADER in request.headers and _may_go_to_device(request)
            while (found := self._taken(need, arithmetic, apart_, device)) is None:
                if not any(one.reopening for one in self.places if one.facts.identity.arithmetic == arithmetic):
                    raise ClosedError("No replica is left that can continue this request; ask again later.")
                await self._losses.changed.wait()
            return found

    async def _work_on(self, request: Request[Any], need: Need, taken: Taken | None) -> None:
        """Run a request on one replica after the other until it is answered, all of one arithmetic."""
        arithmetic = taken.place.facts.identity.arithmetic if taken else self.home
        task: Any = request.task
        tries = 0
        while tries < TRIES:
            now = taken or await self._awaited(need, arithmetic, request)
            before = task.new_tokens
            try:
                return await self._run_on(now, request)
            except WorkerLost as why:
                self._losses.lose(now.place, why)
                taken, tries = None, 0 if task.new_tokens > before else tries + (not isinstance(why, NotBegun))
        raise EdgeInferError(f"{TRIES} replicas ended while they had this request; if they had too little memory, "
                             "lower --max-sequences or --budget.")

    async def _work(self, request: Request[Any], need: Need, taken: Taken | None) -> None:
        """Run a request to its end, and tell its client."""
        task = request.task
        error: BaseException | None = None
        try:
            await self._work_on(request, need, taken)
        except asyncio.CancelledError:
            task.end()
        except EdgeInferError as failure:
            error = failure
        except Exception as failure:  # of this program: the client may not wait for ever
            error = EdgeInferError(f"The request failed ({type(failure).__name__}: {failure}); this is a bug.")
            error.__cause__ = failure
        if error is not None:
            task.end()
        request.conclude(error)

    async def _run_on(self, taken: Taken, request: Request[Any]) -> None:
        """Let a replica run the rest of a request."""
        place, key, helper = taken
        task: Any = request.task
        keeps, ended, computing = request.reuse and not taken.unlike, False, None
        try:
            job: Job = task.job(key, request.salt)
            if helper is not None:
                asked = job._replace(form=place.facts.form if taken.unlike else None)
                job = job._replace(handed=await self._prefill(helper, asked))
                computing = asyncio.ensure_future(self._prefilled(helper, job))
                self._prefills.add(computing)
                computing.add_done_callback(self._prefills.discard)
            async for item in place.process.run(job):
                ended = not isinstance(item, list)
                if computing is not None and isinstance(item, Done):
                    item = place.received(item, await computing, len(job.ids))
                self._take(place, key, request, item, keeps)
            if not ended:
                raise WorkerLost("it ended in the middle of a request")
        except WorkerLost:
            ended = True  # there is nothing to be cancelled
            raise
        finally:
            place.end(key)
            if not ended:
                place.cancel(key)
            if helper is not None:
                helper.end(key)
                helper.cancel(key)

    async def _prefill(self, helper: Place, job: Job) -> Any:
        """Let a replica begin to compute the prompt of a job; None if it cannot."""
        try:
            return await helper.process.prefill(job)
        except WorkerLost as why:
            self._losses.lose(helper, why)
            return None

    async def _prefilled(self, helper: Place, job: Job) -> Prefilled | None:
        """Wait for the prompt of a job that a replica computes; None if it could not."""
        found = None
        try:
            found = job.handed and await helper.process.prefilled(job.key)
        except WorkerLost as why:
            self._losses.lose(helper, why)
        finally:
            helper.end(job.key)
        if found:
            helper.learn(found.speeds)
        return found

    def _take(self, place: Place, key: int, request: Request[Any], item: Item, keeps: bool) -> None:
        task: Any = request.task
        if isinstance(item, list):
            if new := task.take_parts(item):
                place.progress(key, new)
            request.emit("")
        elif isinstance(item, Failed):
            raise item.error
        else:
            assert isinstance(item, Done)
            task.take_parts(item.parts)
            task.take_end(item)
            place.learn(item.speeds)
            self.kv_usage = item.kv_usage
            self.preemptions += item.preemptions
            if keeps and hasattr(task, "samples"):
                place.has(blocks_of([*task.prompt_ids, *task.samples[0].tokens], request.salt))


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task, which has begun by then, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        task.get_loop().call_soon_threadsafe(task.cancel)


def _may_go_apart(request: Request[Any]) -> bool:
    """Return whether a prompt can be computed apart: that of a text, with more than its last token."""
    return hasattr(request.task, "samples") and len(request.task.prompt_ids) > 1


def _may_go_to_device(request: Request[Any]) -> bool:
    """Return whether a device may compute a prompt: not that of several samples, which begin again with the same texts
    if their replica is lost."""
    return hasattr(request.task, "samples") and len(request.task.samples) == 1


def _home(facts: Sequence[Facts]) -> str:
    """Return the arithmetic of most replicas."""
    kinds = [one.identity.arithmetic for one in facts]
    return max(kinds, key=kinds.count)
