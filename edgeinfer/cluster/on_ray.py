"""Workers on Ray: its cluster, the actors on its nodes, and what Ray's errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import EdgeInferError, UsageError
from .pool import WorkerLost
from .worker import Engine, Identity

if TYPE_CHECKING:
    from ..server import Answered

LOCAL = "local"
OBJECT_BYTES = 80_000_000
"""Memory of Ray's store of objects, of which batches have none; Ray takes no less than 75 MB."""
REOPEN_SECONDS, RETRY_SECONDS = 120.0, 0.5
"""Time that a lost worker has to come back, and between two looks at it."""
REACH_SECONDS = 5.0
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
        self.nodes = [Node(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"]["CPU"]))
                      for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU", 0) >= 1]
        if not self.nodes:
            raise EdgeInferError("No node of the Ray cluster has a processor; start one with 'ray start --num-cpus N'.")

    async def open(self, n: int | None, name: str, source: str, options: dict[str, Any]) -> list[ActorWorker]:
        """Return workers that have opened a model: one on each node, or `n` on the nodes in turns.

        Raises
        ------
        EdgeInferError
            A node cannot open it, or the answers of two nodes would not have the same bits.
        """
        count = n or len(self.nodes)
        places = [self.nodes[i % len(self.nodes)] for i in range(count)]
        workers = []
        for i, node in enumerate(places):
            own = _share(options, node, places.count(node))
            workers.append(ActorWorker(self._ray, f"worker {i + 1} on {node.name}", node, (name, source, own)))
        found = await asyncio.gather(*(one.opened() for one in workers))
        _refuse_unlike(list(zip(workers, found, strict=True)))
        return workers


class ActorWorker:
    """A worker that is an actor of Ray on one node."""

    def __init__(self, ray: Any, name: str, node: Node, asked: tuple[str, str, dict[str, Any]]):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.name, self._asked = name, asked
        self._lost = ray.exceptions.RayActorError
        self._failed = ray.exceptions.RayError
        self._actor = ray.remote(Engine).options(
            num_cpus=0, max_restarts=-1, max_concurrency=CONCURRENT,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()

    async def opened(self) -> Identity:
        """Open the model and return what it is; raises `EdgeInferError` with the sentence of the node."""
        try:
            found = await self._actor.open.remote(*self._asked)
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} cannot open the model: {_said(error)}.") from None
        if isinstance(found, str):
            raise EdgeInferError(f"The {self.name} cannot open the model: {found}")
        return Identity(*found)

    async def post(self, url: str, body: bytes) -> Answered:
        """Return the answer to a request."""
        try:
            found = await self._actor.post.remote(url, body)
        except self._lost as error:
            raise WorkerLost(_said(error)) from None
        except self._failed as error:
            raise EdgeInferError(f"The {self.name} failed: {_said(error)}.") from None
        if found is None:
            raise WorkerLost("its process has started again")
        return found

    async def reopen(self) -> None:
        """Open the model in the process that Ray starts in the place of the lost one."""
        until, why = time.monotonic() + REOPEN_SECONDS, "it did not start again"
        while time.monotonic() < until:
            try:
                found = await asyncio.wait_for(self._actor.open.remote(*self._asked), until - time.monotonic())
                if not isinstance(found, str):
                    return
                why = found
            except self._lost as error:
                why = _said(error)
            except asyncio.TimeoutError:
                break
            await asyncio.sleep(RETRY_SECONDS)
        raise WorkerLost(why)


def _share(options: dict[str, Any], node: Node, workers: int) -> dict[str, Any]:
    """Return the options of one of several workers of a node: its processors, and memory that all of them have."""
    threads = options["threads"] or max(1, node.cpus // workers)
    return {**options, "threads": threads, "fill_budget": options["fill_budget"] if workers == 1 else None}


def _refuse_unlike(found: list[tuple[ActorWorker, Identity]]) -> None:
    """Raise `EdgeInferError` unless all workers give the same bits."""
    first, expected = found[0]
    for worker, identity in found[1:]:
        for field, one, other in zip(Identity._fields, expected, identity, strict=True):
            if one != other:
                what = {"version": "edgeinfer", "bundle": "the bundle", "arithmetic": "the instruction set"}[field]
                raise EdgeInferError(f"The {worker.name} has {what} {other[:16]}, and the {first.name} {one[:16]}, so "
                                     "that their texts would differ; use nodes that are alike.")


def _said(error: BaseException) -> str:
    """Return the first sentence of an error of Ray, which may have the log of a process below."""
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")[:200]


@contextlib.contextmanager
def connected(address: str, cpus: int | None = None) -> Iterator[Ray]:
    """Connect to a cluster, or start one of this machine alone that ends with the context.

    Ray must not have been imported before: it reads once, then, whether tokens are required, as here they always are.

    Parameters
    ----------
    address : HOST:PORT of a cluster's head, or ``local``
    cpus : processors that a local one has; None is all

    Raises
    ------
    UsageError
        Ray is not installed.
    EdgeInferError
        The cluster cannot be reached or started.
    """
    if address != LOCAL:
        _reach(address)
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
    if address == LOCAL:
        variables["RAY_AUTH_TOKEN"] = _own_token()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        ray = _imported()
        handlers = _signal_handlers()
        own: dict[str, Any] = dict(num_cpus=cpus, object_store_memory=OBJECT_BYTES,
                                   include_dashboard=False) if address == LOCAL else {}
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
        except Exception as error:  # Ray has no class of its own for most of them
            ray.shutdown()
            raise EdgeInferError(f"Cannot start Ray here: {_said(error)}." if own else f"Cannot connect to Ray at "
                                 f"{address}: {_said(error)}; RAY_AUTH_TOKEN must be the cluster's token.") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        try:
            yield Ray(ray)
        finally:
            ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reach(address: str) -> None:
    """Raise an error unless something listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--ray is {address!r}; write it as HOST:PORT, such as 192.168.1.10:6379, or local.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise EdgeInferError(f"Cannot connect to Ray at {address}: {error.strerror or error}; start it there with "
                             "'ray start --head'.") from None


@cache
def _own_token() -> str:
    """Return the token of local clusters: one for this process, as Ray reads it once."""
    return secrets.token_hex(32)


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("A cluster needs the package ray; install it with: pip install 'edgeinfer[cluster]'") from None
    return ray


def _signal_handlers() -> dict[int, Any]:
    """Return the handlers of this program, which Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
