"""Workers on Ray: actors on the nodes of its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from edgeinfer.memory_planner import process_budget, serving_share

from ..config import CUDA
from ..errors import EdgeInferError
from ..techniques import WITHOUT_DRAFTS
from .actor import ActorWorker, Node, refusal
from .connection import first_sentence, initialised
from .job import Identity, Refused
from .pushing import pushed, seen
from .split import NodeSplit
from .stages import Stored
from .worker import planned

T = TypeVar("T")
PREFILL_SEQUENCES = 2
"""Prompts that a worker on a device computes at once: of one the rest is read while the next begins."""


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
        the node's available memory. Ray reserves these bytes. A bundle that a node does not see is sent there.

        Raises
        ------
        EdgeInferError
            A node cannot open it, or the answers of two nodes would not have the same bits.
        """
        workers, found = await self._opened("worker", (name, source), [(one, options) for one in self._places(n)])
        _refuse_unlike(list(zip(workers, found, strict=True)))
        return workers

    async def replicas(self, n: int | None, name: str, source: str, options: dict[str, Any], prefill: int = 0,
                       device: str | None = None) -> list[ActorWorker]:
        """Return workers for a server, as `open`, whose arithmetic may differ: its router keeps them apart.

        The first `prefill` ones are to compute prompts: on a `device` of onnxruntime, or else those which are the
        fastest if some are twice as fast as others.
        """
        places = [(one, options) for one in self._places(n)]
        if device is not None:
            places = [(one, prefilling(options, device)) for one in self._places(prefill, device)] + places[prefill:]
        workers, found = await self._opened("replica", (name, source), places)
        _refuse_unlike([(one, identity._replace(arithmetic="")) for one, identity in zip(workers, found, strict=True)])
        for one in workers:  # one after the other, since each is measured
            await one.learn_facts()
        if prefill:
            if device is None:
                workers.sort(key=lambda one: round(math.log2(one.facts.speeds.prompt)))
            for one in workers[prefill:]:
                if device is not None and not workers[0].facts.may_compute_for(one.facts):
                    raise EdgeInferError(f"The {one.name} takes no prompts that {device} computes; leave out "
                                         "--prefill-device.")
                await one.measure_link(workers[0])
        return workers

    def _places(self, n: int | None, device: str | None = None) -> list[Node]:
        """Return the nodes of workers: all in turns, or for CUDA one for each GPU."""
        if device != CUDA:
            return [self.nodes[i % len(self.nodes)] for i in range(n or len(self.nodes))]
        gpus = [one for one in self.nodes for _ in range(one.gpus)]
        if len(gpus) < (n or 1):
            raise EdgeInferError(f"--prefill {n} with --prefill-device {device} needs as many GPUs, and Ray knows "
                                 f"{len(gpus)} on the nodes; lower --prefill, or join nodes with GPUs.")
        return gpus[:n]

    async def ask(self, node: Node, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a process of a node and return its result; raises `EdgeInferError` with its error."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(function).options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
        try:
            return await remote.remote(*arguments)
        except self._ray.exceptions.RayError as error:
            raise EdgeInferError(f"{first_sentence(error)}.") from None

    def split(self, split: str, stored: Stored, say: Callable[[str], object]) -> NodeSplit:
        """Return the function that opens models with their layers on the nodes that exist then."""
        def nodes() -> tuple[list[Node], str]:
            return nodes_of(self._ray), self._ray.get_runtime_context().get_node_id()

        return NodeSplit(self._ray, nodes, split, stored, say)

    def end(self, workers: list[ActorWorker]) -> None:
        """End the processes of workers."""
        for one in workers:
            one.kill()

    async def _opened(self, kind: str, model: tuple[str, str], asked: list[tuple[Node, dict[str, Any]]]
                      ) -> tuple[list[ActorWorker], list[Identity]]:
        name, source = model
        places = [node for node, _ in asked]
        nodes = list(dict.fromkeys(places))
        rooms = dict(zip(nodes, await asyncio.gather(*(self.ask(one, process_budget) for one in nodes)), strict=True))
        sent = {node: await self._source_on(node, source, asked[0][1]) for node in nodes}
        alike = {(node, id(options)): _share({**options, **sent[node][1]}, node, places.count(node), rooms[node])
                 for node, options in asked}
        found = dict(zip(alike, await asyncio.gather(*(self.ask(node, planned, sent[node][0], share)
                                                       for (node, _), share in alike.items())), strict=True))
        names = [f"{kind} {i + 1} on {node.name}" for i, node in enumerate(places)]
        workers, together = list[ActorWorker](), Counter[Node]()
        plans = list[int]()
        for worker, (node, options) in zip(names, asked, strict=True):
            if isinstance(plan := found[node, id(options)], Refused):
                raise refusal(worker, plan)
            together[node] += plan
            plans.append(plan)
        free = {node: self._free(node) for node in nodes}
        for worker, plan, (node, options) in zip(names, plans, asked, strict=True):
            asks = (name, sent[node][0], alike[node, id(options)])
            workers.append(ActorWorker(self._ray, worker, node, asks, plan))
        def reserved(node: Node) -> bool:
            return self._free(node) <= free[node] - together[node]

        try:
            await asyncio.gather(*(one.started(places.count(node), together[node], partial(reserved, node))
                                   for one, node in zip(workers, places, strict=True)))
            return workers, await asyncio.gather(*(one.opened() for one in workers))
        except BaseException:
            self.end(workers)
            raise

    def _free(self, node: Node) -> int:
        """Return the memory that Ray has not reserved on a node."""
        there: dict[str, Any] = self._ray._private.state.available_resources_per_node()
        return int(there.get(node.id, {}).get("memory", 0))

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
                 int(one["Resources"].get("memory", 0)), int(one["Resources"].get("GPU", 0)))
            for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU", 0) >= 1]


def prefilling(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the options of a worker that computes prompts on a device, from those of workers that answer."""
    return {**options, **WITHOUT_DRAFTS, "device": device, "kv": None, "kv_memory": None, "fill_budget": None,
            "max_sequences": PREFILL_SEQUENCES}


@contextlib.contextmanager
def connected(address: str, cpus: int | None = None, say: Callable[[str], object] = lambda sentence: None
              ) -> Iterator[Ray]:
    """Connect to a cluster, or start one of this machine alone that ends with the context; see `initialised`."""
    with initialised(address, cpus) as ray:
        yield Ray(ray, say)


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
                raise EdgeInferError(f"The {worker.name} has {what} {_short(field, other)}, and the {first.name} "
                                     f"{_short(field, one)}, so that their texts would differ; use nodes that are "
                                     "alike.")


def _short(field: str, value: str) -> str:
    """Return a part of an identity as a message has it: the beginning of a checksum, an arithmetic without its own."""
    return value.rpartition(" ")[0] or value if field == "arithmetic" else value[:16]
