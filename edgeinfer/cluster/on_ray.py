"""Workers on Ray: actors on the nodes of its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import EdgeInferError
from .connection import first_sentence, initialised
from .job import Facts, Failed, Identity, Item, Job, Refused, WorkerLost
from .split import NodeSplit
from .stages import Stored
from .worker import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..server import Answered

T = TypeVar("T")
REOPEN_SECONDS, RETRY_SECONDS = 120.0, 0.5
"""Time that a lost worker has to come back, and between two looks at it."""
CONCURRENT = 4096
"""Calls that an actor takes at once: the engine has the queue."""


class Node(NamedTuple):
    """A machine of the cluster, or a container."""

    id: str
    name: str
    cpus: int


class Ray:
    """A connection to a cluster.

    Attributes
    ----------
    nodes : list of Node
        Those that are alive and have processors.
    """

    def __init__(self, ray: Any):
        self._ray = ray
        self.nodes = nodes_of(ray)
        if not self.nodes:
            raise EdgeInferError("No node of the Ray cluster has a processor; start one with 'ray start --num-cpus N'.")

    async def open(self, n: int | None, name: str, source: str, options: dict[str, Any]) -> list[ActorWorker]:
        """Return workers that have opened a model: one on each node, or `n` on the nodes in turns.

        Workers of one node have equal shares of its processors and of its memory, which is the budget of `options` or
        what the node can give.

        Raises
        ------
        EdgeInferError
            A node cannot open it, or the answers of two nodes would not have the same bits.
        """
        workers, found = await self._opened(n, "worker", (name, source, options))
        _refuse_unlike(list(zip(workers, found, strict=True)))
        return workers

    async def replicas(self, n: int | None, name: str, source: str, options: dict[str, Any]) -> list[ActorWorker]:
        """Return workers for a server, as `open`, whose arithmetic may differ: its router keeps them apart."""
        workers, found = await self._opened(n, "replica", (name, source, options))
        _refuse_unlike([(one, identity._replace(arithmetic="")) for one, identity in zip(workers, found, strict=True)])
        for one in workers:  # one after the other, since each is measured
            await one.learn_facts()
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
        places = [self.nodes[i % len(self.nodes)] for i in range(n or len(self.nodes))]
        workers = [ActorWorker(self._ray, f"{kind} {i + 1} on {node.name}", node) for i, node in enumerate(places)]
        rooms = await asyncio.gather(*(one.room() for one in workers))
        for worker, node, room in zip(workers, places, rooms, strict=True):
            worker.asked = *asked[:2], _share(asked[2], node, places.count(node), room)
        return workers, await asyncio.gather(*(one.opened() for one in workers))


def nodes_of(ray: Any) -> list[Node]:
    """Return the nodes that are alive and have processors."""
    return [Node(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"]["CPU"]))
            for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU", 0) >= 1]


@contextlib.contextmanager
def connected(address: str, cpus: int | None = None) -> Iterator[Ray]:
    """Connect to a cluster, or start one of this machine alone that ends with the context; see `initialised`."""
    with initialised(address, cpus) as ray:
        yield Ray(ray)


class ActorWorker:
    """A worker of a batch and a replica of a server: an actor of Ray on one node."""

    facts: Facts
    _identity: Identity

    def __init__(self, ray: Any, name: str, node: Node):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.name, self._ray = name, ray
        self.asked: tuple[str, str, dict[str, Any]]
        self._lost = ray.exceptions.RayActorError
        self._failed = ray.exceptions.RayError
        self._actor = ray.remote(Engine).options(
            num_cpus=0, max_restarts=-1, max_concurrency=CONCURRENT,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()

    def kill(self) -> None:
        """End its process."""
        self._ray.kill(self._actor)

    async def room(self) -> int:
        """Return the bytes that the node can give, before any worker there has opened a model."""
        try:
            return int(await self._actor.room.remote())
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


def _share(options: dict[str, Any], node: Node, workers: int, room: int) -> dict[str, Any]:
    """Return the options of one of several workers of a node: its processors and memory in equal shares."""
    if workers == 1:
        return {**options, "threads": options["threads"] or node.cpus}
    return {**options, "threads": options["threads"] or max(1, node.cpus // workers),
            "budget": (options["budget"] or room) // workers}


def _refuse_unlike(found: list[tuple[ActorWorker, Identity]]) -> None:
    """Raise `EdgeInferError` unless all workers give the same bits."""
    first, expected = found[0]
    for worker, identity in found[1:]:
        for field, one, other in zip(Identity._fields, expected, identity, strict=True):
            if one != other:
                what = {"version": "edgeinfer", "bundle": "the bundle", "arithmetic": "the instruction set"}[field]
                raise EdgeInferError(f"The {worker.name} has {what} {other[:16]}, and the {first.name} {one[:16]}, so "
                                     "that their texts would differ; use nodes that are alike.")
