"""Workers on Ray: actors on the nodes of its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from edgeinfer.memory_planner import process_budget, serving_share

from ..base.units import format_size
from ..errors import EdgeInferError
from .connection import first_sentence, initialised
from .job import Facts, Failed, Handed, Identity, Item, Job, Refused, WorkerLost
from .pushing import pushed, seen
from .split import NodeSplit
from .stages import Stored
from .worker import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..server import Answered

T = TypeVar("T")
REOPEN_SECONDS, RETRY_SECONDS = 120.0, 0.5
"""Time that a lost worker has to come back, and between two looks at it."""
START_SECONDS = 30.0
"""Time in which Ray has to find memory for a worker: that of a server which has just ended is soon free."""
CONCURRENT = 4096
"""Calls that an actor takes at once: the engine has the queue."""


class Node(NamedTuple):
    """A machine of the cluster, or a container."""

    id: str
    name: str
    cpus: int
    memory: int
    """Bytes that Ray gives to its processes."""


class Ray:
    """A connection to a cluster.

    Attributes
    ----------
    nodes : list of Node
        Those that are alive and have processors.
    """

    def __init__(self, ray: Any, say: Callable[[str], object] = lambda sentence: None):
        self._ray, self._say = ray, say
        self.nodes = nodes_of(ray)
        if not self.nodes:
            raise EdgeInferError("No node of the Ray cluster has a processor; start one with 'ray start --num-cpus N'.")

    async def open(self, n: int | None, name: str, source: str, options: dict[str, Any]) -> list[ActorWorker]:
        """Return workers that have opened a model: one on each node, or `n` on the nodes in turns.

        Workers of one node have equal shares of its processors and of its memory, which is the budget of `options` or
        what the node can give. Ray reserves these bytes. A bundle that a node does not see is sent there.

        Raises
        ------
        EdgeInferError
            A node cannot open it, or the answers of two nodes would not have the same bits.
        """
        workers, found = await self._opened(n, "worker", (name, source, options))
        _refuse_unlike(list(zip(workers, found, strict=True)))
        return workers

    async def replicas(self, n: int | None, name: str, source: str, options: dict[str, Any], prefill: int = 0
                       ) -> list[ActorWorker]:
        """Return workers for a server, as `open`, whose arithmetic may differ: its router keeps them apart.

        The first `prefill` ones, which are the fastest if some are twice as fast as others, are to compute prompts.
        """
        workers, found = await self._opened(n, "replica", (name, source, options))
        _refuse_unlike([(one, identity._replace(arithmetic="")) for one, identity in zip(workers, found, strict=True)])
        for one in workers:  # one after the other, since each is measured
            await one.learn_facts()
        if prefill:
            workers.sort(key=lambda one: round(math.log2(one.facts.speeds.prompt)))
            for one in workers[prefill:]:
                await one.measure_link(workers[0])
        return workers

    async def ask(self, node: Node, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns in a process of a node; raises `EdgeInferError` with what it raises."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(function).options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
        try:
            return await remote.remote(*arguments)
        except self._ray.exceptions.RayError as error:
            raise EdgeInferError(f"{first_sentence(error)}.") from None

    def split(self, split: str, stored: Stored, say: Callable[[str], object]) -> NodeSplit:
        """Return what opens models with their layers on the nodes that are there then."""
        def nodes() -> tuple[list[Node], str]:
            return nodes_of(self._ray), self._ray.get_runtime_context().get_node_id()

        return NodeSplit(self._ray, nodes, split, stored, say)

    def end(self, workers: list[ActorWorker]) -> None:
        """End the processes of workers."""
        for one in workers:
            one.kill()

    async def _opened(self, n: int | None, kind: str, asked: tuple[str, str, dict[str, Any]]
                      ) -> tuple[list[ActorWorker], list[Identity]]:
        name, source, options = asked
        places = [self.nodes[i % len(self.nodes)] for i in range(n or len(self.nodes))]
        nodes = list(dict.fromkeys(places))
        rooms = dict(zip(nodes, await asyncio.gather(*(self.ask(one, process_budget) for one in nodes)), strict=True))
        sent = {node: await self._source_on(node, source, options) for node in nodes}
        workers = []
        for i, node in enumerate(places):
            share = _share({**options, **sent[node][1]}, node, places.count(node), rooms[node])
            workers.append(ActorWorker(self._ray, f"{kind} {i + 1} on {node.name}", node,
                                       (name, sent[node][0], share)))
        try:
            await asyncio.gather(*(one.started(places.count(node)) for one, node in zip(workers, places, strict=True)))
            return workers, await asyncio.gather(*(one.opened() for one in workers))
        except BaseException:
            self.end(workers)
            raise

    async def _source_on(self, node: Node, source: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the model as a node finds it, and options that differ there."""
        if not os.path.exists(source) or await self.ask(node, seen, source):
            return source, {}
        from ..models import Storage, resolve

        stored = {one: options.get(one) for one in ("weights", "group_size")}
        bundle = resolve(source, storage=Storage(**stored))
        try:
            path = await pushed(partial(self.ask, node), bundle,
                                lambda size: self._say(f"{node.name} does not see {source}; {size} go there."))
        except EdgeInferError as error:
            raise EdgeInferError(f"{source} cannot be sent to {node.name}: {error}") from None
        return path, dict.fromkeys(stored)


def nodes_of(ray: Any) -> list[Node]:
    """Return the nodes that are alive and have processors."""
    return [Node(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"]["CPU"]),
                 int(one["Resources"].get("memory", 0)))
            for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU", 0) >= 1]


@contextlib.contextmanager
def connected(address: str, cpus: int | None = None, say: Callable[[str], object] = lambda sentence: None
              ) -> Iterator[Ray]:
    """Connect to a cluster, or start one of this machine alone that ends with the context; see `initialised`."""
    with initialised(address, cpus) as ray:
        yield Ray(ray, say)


class ActorWorker:
    """A worker of a batch and a replica of a server: an actor of Ray on one node."""

    facts: Facts
    _identity: Identity

    def __init__(self, ray: Any, name: str, node: Node, asked: tuple[str, str, dict[str, Any]]):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.name, self._ray, self._node, self.asked = name, ray, node, asked
        self._lost = ray.exceptions.RayActorError
        self._failed = ray.exceptions.RayError
        self._actor = ray.remote(Engine).options(
            num_cpus=0, memory=asked[2]["budget"], max_restarts=-1, max_concurrency=CONCURRENT,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()

    def kill(self) -> None:
        """End its process."""
        self._ray.kill(self._actor)

    async def started(self, alike: int) -> None:
        """Return once Ray has reserved its memory, of which `alike` workers of its node have as much each."""
        try:
            await asyncio.wait_for(self._actor.__ray_ready__.remote(), START_SECONDS)
        except asyncio.TimeoutError:
            asks = format_size(alike * int(self.asked[2]["budget"]))
            raise EdgeInferError(f"The {self.name} cannot start: Ray gives {format_size(self._node.memory)} of memory "
                                 f"to the processes there, of which {asks} for all {alike} are not free; lower "
                                 "--budget, or end what has it.") from None
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} cannot start: {first_sentence(error)}.") from None

    async def opened(self) -> Identity:
        """Open the model and return what it is; raises `EdgeInferError` with the sentence of the node."""
        try:
            found = await self._actor.open.remote(*self.asked)
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} cannot open the model: {first_sentence(error)}.") from None
        if isinstance(found, Refused):
            refused = EdgeInferError(f"The {self.name} cannot open the model: {found.sentence}")
            refused.code, refused.exit_code = found.code, found.exit_code
            raise refused
        self._identity = Identity(*found)
        return self._identity

    async def post(self, url: str, body: bytes) -> Answered:
        """Return the answer to a request."""
        try:
            found = await self._actor.post.remote(url, body)
        except self._lost as error:
            raise WorkerLost(first_sentence(error)) from None
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} failed: {first_sentence(error)}.") from None
        if found is None:
            raise WorkerLost("its process has started again")
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
        item = None
        try:
            while item is None or isinstance(item, list):
                item = await (self._actor.begin.remote(job) if item is None else self._actor.more.remote(job.key))
                if item is None:
                    raise WorkerLost("its process has started again")
                yield item
        except self._lost as error:
            raise WorkerLost(first_sentence(error)) from None
        except self._failed as error:
            yield Failed(EdgeInferError(f"The {self.name} failed: {first_sentence(error)}."))

    async def prefill(self, job: Job) -> Handed | None:
        """Compute the prompt of a job, which another replica fetches from this one's process."""
        try:
            found = await self._actor.prefill.remote(job)
        except self._failed as error:
            raise WorkerLost(first_sentence(error)) from None
        if found is False:
            raise WorkerLost("its process has started again")
        return found and found._replace(sender=Sender(self._actor, job.key))

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


class Sender(NamedTuple):
    """The worker that has computed a prompt, as another one reaches it."""

    actor: Any
    key: int

    async def piece(self, number: int) -> bytes:
        """Return a piece of the KV blocks; raises `WorkerLost`."""
        from ray.exceptions import RayError

        try:
            found = await self.actor.piece.remote(self.key, number)
        except RayError as error:
            raise WorkerLost(first_sentence(error)) from None
        if found is None:
            raise WorkerLost("its process has started again")
        return bytes(found)

    async def probe(self, nbytes: int) -> None:
        """Let so many bytes come."""
        await self.actor.probe.remote(nbytes)


def _share(options: dict[str, Any], node: Node, workers: int, room: int) -> dict[str, Any]:
    """Return the options of one of several workers of a node: its processors and memory in equal shares."""
    budget = options["budget"] or serving_share(min(room, node.memory or room))
    return {**options, "threads": options["threads"] or max(1, node.cpus // workers), "budget": budget // workers}


def _refuse_unlike(found: list[tuple[ActorWorker, Identity]]) -> None:
    """Raise `EdgeInferError` unless all workers give the same bits."""
    first, expected = found[0]
    for worker, identity in found[1:]:
        for field, one, other in zip(Identity._fields, expected, identity, strict=True):
            if one != other:
                what = {"version": "edgeinfer", "bundle": "the bundle", "arithmetic": "the instruction set"}[field]
                raise EdgeInferError(f"The {worker.name} has {what} {other[:16]}, and the {first.name} {one[:16]}, so "
                                     "that their texts would differ; use nodes that are alike.")
