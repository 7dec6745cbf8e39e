"""Actors of Ray that hold the model: workers of a batch and replicas of a server."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.units import format_size
from ..config import CUDA
from ..errors import EdgeInferError
from .connection import first_sentence
from .handing import Piece
from .job import Facts, Failed, Identity, Item, Job, NotBegun, Prefilled, Refused, WorkerLost
from .worker import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ..server import Answered

REOPEN_SECONDS, RETRY_SECONDS = 120.0, 0.5
"""Time that a lost worker has to come back, and between two looks at it."""
START_SECONDS, SLOW_START_SECONDS = 30.0, 600.0
"""Time in which Ray has to find memory for a worker, since that of a server which has just ended is soon free; and
further time for the start of its process on a busy machine, as long as Ray itself waits."""
AGAIN = "its process has started again"
CONCURRENT = 4096
"""Calls that an actor takes at once: the engine has the queue."""


class Node(NamedTuple):
    """A machine of the cluster, or a container."""

    id: str
    name: str
    cpus: int
    memory: int
    """Bytes that Ray gives to its processes."""
    gpus: int = 0


class ActorWorker:
    """A worker of a batch and a replica of a server: an actor of Ray on one node."""

    facts: Facts
    _identity: Identity

    def __init__(self, ray: Any, name: str, node: Node, asked: tuple[str, str, dict[str, Any]], nbytes: int):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.name, self._ray, self._node, self.asked, self.nbytes = name, ray, node, asked, nbytes
        self._failed = ray.exceptions.RayError
        self._raised = ray.exceptions.RayTaskError  # by our own code; all else is the loss of a process or a machine
        self._actor = ray.remote(Engine).options(
            num_cpus=0, num_gpus=int(asked[2].get("device") == CUDA), memory=nbytes, max_restarts=-1,
            max_concurrency=CONCURRENT,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()

    def kill(self) -> None:
        """End its process."""
        self._ray.kill(self._actor)

    async def started(self, alike: int, together: int, reserved: Callable[[], bool]) -> None:
        """Return once its process runs.

        Parameters
        ----------
        alike, together : workers of its node, and the bytes of all of them
        reserved : returns whether Ray has reserved these bytes, so that only the start of processes takes its time
        """
        ready = asyncio.ensure_future(self._ready())
        try:
            done, _ = await asyncio.wait({ready}, timeout=START_SECONDS)
            if not done and reserved():
                done, _ = await asyncio.wait({ready}, timeout=SLOW_START_SECONDS)
                if not done:
                    raise EdgeInferError(f"The {self.name} cannot start: Ray has reserved its memory, and its process "
                                         f"does not run after {SLOW_START_SECONDS:.0f} s; end other programs there, "
                                         "or see Ray's log of it.")
            if done:
                return await ready
            raise EdgeInferError(f"The {self.name} cannot start: Ray gives {format_size(self._node.memory)} of memory "
                                 f"to the processes there, of which {format_size(together)} for all {alike} are "
                                 "not free; lower --budget, or end the program that has it.")
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} cannot start: {first_sentence(error)}.") from None
        finally:
            ready.cancel()

    async def _ready(self) -> None:
        await self._actor.__ray_ready__.remote()

    async def opened(self) -> Identity:
        """Open the model and return its description; raises `EdgeInferError` with the sentence of the node."""
        try:
            found = await self._actor.open.remote(*self.asked)
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} cannot open the model: {first_sentence(error)}.") from None
        if isinstance(found, Refused):
            raise refusal(self.name, found)
        self._identity = Identity(*found)
        return self._identity

    async def post(self, url: str, body: bytes) -> Answered:
        """Return the answer to a request."""
        try:
            found = await self._actor.post.remote(url, body)
        except self._raised as error:
            raise EdgeInferError(f"The {self.name} failed: {first_sentence(error)}.") from None
        except self._failed as error:
            raise WorkerLost(first_sentence(error)) from None
        if found is None:
            raise NotBegun(AGAIN)
        return found

    async def learn_facts(self) -> None:
        """Ask for the properties of the open model."""
        try:
            self.facts = await self._actor.facts.remote()
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} failed: {first_sentence(error)}.") from None

    async def run(self, job: Job) -> AsyncIterator[Item]:
        """Run a job, whose last item is `Done` or `Failed`.

        Each item is a call: a generator of Ray costs less for an item and more for a request, most of which are short.
        """
        item, begins = None, True
        try:
            while begins or isinstance(item, list):
                item = await (self._actor.begin.remote(job) if begins else self._actor.more.remote(job.key))
                if item is None:
                    raise NotBegun(AGAIN) if begins else WorkerLost(AGAIN)
                begins = False
                yield item
        except self._raised as error:
            yield Failed(EdgeInferError(f"The {self.name} failed: {first_sentence(error)}."))
        except self._failed as error:
            raise WorkerLost(first_sentence(error)) from None

    async def prefill(self, job: Job) -> Sender | None:
        """Begin to compute the prompt of a job, which another replica fetches from this one's process."""
        try:
            begun = await self._actor.prefill.remote(job)
        except self._failed as error:
            raise WorkerLost(first_sentence(error)) from None
        if begun is None:
            raise WorkerLost(AGAIN)
        return Sender(self._actor, job.key) if begun else None

    async def prefilled(self, key: int) -> Prefilled | None:
        """Return when such a prompt is complete; None if it could not be computed."""
        try:
            return await self._actor.prefilled.remote(key)
        except self._failed as error:
            raise WorkerLost(first_sentence(error)) from None

    async def measure_link(self, other: ActorWorker) -> None:
        """Learn how long a byte takes from another worker to this one."""
        try:
            seconds = await self._actor.link.remote(Sender(other._actor, -1))
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} failed: {first_sentence(error)}.") from None
        self.facts = self.facts._replace(speeds=self.facts.speeds._replace(link=seconds))

    async def cancel(self, key: int) -> None:
        """End a job."""
        await self._actor.cancel.remote(key)

    async def ended(self) -> WorkerLost:
        """Return once its process has ended."""
        try:
            await self._actor.watch.remote()
        except self._failed as error:
            return WorkerLost(first_sentence(error))
        return WorkerLost(AGAIN)

    async def reopen(self) -> None:
        """Open the model in the process that Ray starts in the place of the lost one."""
        until, why = time.monotonic() + REOPEN_SECONDS, "it did not start again"
        while time.monotonic() < until:
            try:
                found = await asyncio.wait_for(self._actor.open.remote(*self.asked), until - time.monotonic())
                if isinstance(found, Refused):
                    why = found.sentence
                elif Identity(*found) == self._identity:
                    return
                else:
                    raise WorkerLost("edgeinfer or the bundle was replaced there; start again with all of them alike")
            except self._failed as error:
                why = first_sentence(error)
            except asyncio.TimeoutError:
                break
            await asyncio.sleep(RETRY_SECONDS)
        raise WorkerLost(why)


def refusal(name: str, found: Refused) -> EdgeInferError:
    """Return the error of a worker that cannot open the model."""
    refused = EdgeInferError(f"The {name} cannot open the model: {found.sentence}")
    refused.code, refused.exit_code = found.code, found.exit_code
    return refused


class Sender(NamedTuple):
    """The worker that computes a prompt, as another one reaches it."""

    actor: Any
    key: int

    async def piece(self, offset: int) -> Piece:
        """Return the KV blocks that there are from an offset on; raises `WorkerLost`."""
        from ray.exceptions import RayError

        try:
            found = await self.actor.piece.remote(self.key, offset)
        except RayError as error:
            raise WorkerLost(first_sentence(error)) from None
        if found is None:
            raise WorkerLost("it has no such prompt")
        return Piece(*found)

    async def probe(self, nbytes: int) -> None:
        """Let so many bytes come."""
        await self.actor.probe.remote(nbytes)
