"""Stages of a pipeline on the nodes of a Ray cluster: actors that hold layers, and the transport of calls to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from edgeinfer import devices

from .. import __version__, pipeline
from ..base.units import format_size
from ..errors import ClosedError, EdgeInferError
from ..pipeline import Stage, StageInfo, error_of
from .connection import first_sentence

if TYPE_CHECKING:
    from ..config import RuntimeConfig
    from ..pipeline import Part, StageCalls
    from ..runner import Cancellation
    from ..runtime import Rows
    from .actor import Node

WAIT_SECONDS = 0.02
"""Longest wait before a cancellation is looked at again."""
START_SECONDS = 30.0
"""Time in which Ray has to find memory for a stage: that of a server which has just ended is soon free."""
SIGNALS = "signals"
"""Concurrency group of the calls that do not wait for a forward pass."""


class Stored(NamedTuple):
    """A model as a node finds it."""

    source: str
    weights: str | None
    group_size: int | None


class NodeFacts(NamedTuple):
    """Properties of a node, before it holds a stage."""

    version: str
    room: int
    """Bytes that it can give."""
    threads: int
    speed: float
    """Predicted tokens per second of the whole model; 0 where the node was not probed."""


class Failure(NamedTuple):
    """An error of a node: its class and its sentence."""

    kind: str
    sentence: str


class StageHost:
    """Holds a stage in a process that Ray has started; its methods are called from elsewhere, in order."""

    def __init__(self) -> None:
        self._calls: StageCalls | None = None
        self._failed: EdgeInferError | None = None
        self._last = 0
        self.given_up = 0
        self._end = threading.Event()

    def open(self, stored: Stored, config: dict[str, Any], first: int, last: int) -> StageInfo | Failure:
        """Open the layers of a model."""
        from ..bundle import Bundle
        from ..runtime import StageSession

        try:
            bundle = Bundle.open(bundle_here(stored))
            self._calls = pipeline.StageCalls(StageSession(bundle, pipeline.config_of(config), first, last))
        except Exception as error:
            return _failure(pipeline.as_error(error))
        return self._calls.info()

    def call(self, number: int, name: str, arguments: tuple[Any, ...], answers: bool) -> Any:
        """Make a call; without an answer, its error is raised by the next call that has one."""
        return self._made(number, lambda calls: calls.call(name, arguments), answers)

    def run(self, number: int, part: Part, rows: Rows | None) -> Any:
        """Run a part of a forward pass."""
        return self._made(number, lambda calls: calls.run(part, rows, pipeline.Wish(self, number)), True)

    def give_up(self, number: int) -> None:
        """End all parts up to a number; it does not wait for them."""
        self.given_up = number

    def watch(self) -> None:
        """Return at the end of this process, which Ray reports to the caller as an error."""
        self._end.wait()

    def _made(self, number: int, call: Callable[[StageCalls], Any], answers: bool) -> Any:
        try:
            if self._calls is None or number != self._last + 1:
                raise EdgeInferError("The calls to a stage arrived out of order; open the model again.")
            self._last = number
            made = call(self._calls)
        except Exception as error:
            if answers:
                return _failure(pipeline.as_error(error))
            self._failed = self._failed or pipeline.as_error(error)
            return None
        if not answers:
            return None
        failed, self._failed = self._failed, None
        return _failure(failed) if failed else made


def _failure(error: EdgeInferError) -> Failure:
    return Failure(type(error).__name__, str(error))


def bundle_here(stored: Stored) -> Any:
    """Return the path of a model's bundle on this machine; raises as `models.resolve`."""
    from ..models import Storage, resolve

    return resolve(stored.source, storage=Storage(stored.weights, stored.group_size))


def facts_there(stored: Stored, ctx: int | None, kv: str) -> NodeFacts | Failure:
    """Return how this process's machine would run a model, or why that cannot be said."""
    try:
        return facts_here(stored, ctx, kv)
    except EdgeInferError as error:
        return _failure(error)


def facts_here(stored: Stored, ctx: int | None, kv: str) -> NodeFacts:
    """Return how this machine would run a model; raises as `models.resolve`."""
    from edgeinfer.memory_planner import default_ctx, default_threads, process_budget

    from ..models.describe import describe

    path, profile, speed = bundle_here(stored), devices.local_profile(), 0.0
    if profile is not None:
        model = describe(path)
        speed = devices.estimate(profile, model.traffic(kv), ctx or default_ctx(model.config)).decode_tok_per_s
    return NodeFacts(__version__, process_budget(), default_threads(), speed)


class NodeStage(Stage):
    """A stage on a node.

    Parameters
    ----------
    ray : the package, connected
    node : Node
    """

    def __init__(self, ray: Any, node: Node):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.where, self._ray, self._node, self._sent = f"node {node.name}", ray, node, 0
        self._closed = False
        self._actor: Any = None
        self._there = NodeAffinitySchedulingStrategy(node.id, soft=False)

    def facts(self, stored: Stored, ctx: int | None, kv: str) -> NodeFacts:
        """Return the properties of the node; raises `EdgeInferError` with its sentence."""
        asked = self._ray.remote(facts_there).options(num_cpus=0, max_retries=0, scheduling_strategy=self._there)
        found = NodeFacts(*self._found(asked.remote(stored, ctx, kv)))
        if found.version != __version__:
            raise EdgeInferError(f"The {self.where} has edgeinfer {found.version}, and this machine {__version__}; "
                                 "install the same on all.")
        return found

    def open(self, stored: Stored, config: RuntimeConfig, first: int, last: int, nbytes: int) -> None:
        """Begin to open layers, whose plan has so many bytes, which Ray reserves; `wait` waits for them."""
        self._actor = self._ray.remote(concurrency_groups={SIGNALS: 2})(StageHost).options(
            num_cpus=0, memory=nbytes, max_restarts=0, max_concurrency=1, scheduling_strategy=self._there).remote()
        try:
            self._ray.get(self._actor.__ray_ready__.remote(), timeout=START_SECONDS)
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.ActorUnschedulableError):
            raise EdgeInferError(
                f"The stage on {self.where} cannot start: of the {format_size(self._node.memory)} that Ray gives to "
                f"the processes there, {format_size(nbytes)} are not free; end the programs that have them, or "
                "give the stage fewer layers.") from None
        except self._ray.exceptions.RayError as error:
            raise self._ended(error) from None
        self._watched = self._actor.watch.options(concurrency_group=SIGNALS).remote()
        self._opening = self._actor.open.remote(stored, pipeline.plain_config(config), first, last)

    def wait(self) -> None:
        """Return when the stage is open."""
        self.info = StageInfo(*self._found(self._opening))

    @property
    def lost(self) -> bool:
        """True if the actor has ended."""
        return not self._closed and bool(self._ray.wait([self._watched], timeout=0)[0])

    def ask(self, name: str, *arguments: Any) -> Any:
        """Make a call and wait for its answer."""
        return self._found(self._call(name, arguments, True))

    def post(self, name: str, *arguments: Any) -> None:
        """Make a call; its error is raised by the next answer."""
        self._call(name, arguments, False)

    def start(self, part: Part, given: Rows | None) -> None:
        """Send a part; samples and the functions that prepare them stay here."""
        segments = [segment._replace(sample_specs=(), prepare=None) for segment in part.segments]
        self._check_open()
        self._sent += 1
        self._started = self._actor.run.remote(self._sent, part._replace(segments=segments), given)

    def finish(self, cancel: Cancellation | None) -> Rows:
        """Wait for the rows."""
        told = cancel is None
        while not told and not self._ray.wait([self._started], timeout=WAIT_SECONDS)[0]:
            if cancel is not None and cancel.asked:
                told = True
                self.give_up()
        rows: Rows = self._found(self._started)
        return rows

    def give_up(self) -> None:
        """Let all parts that were sent end."""
        self._check_open()
        self._actor.give_up.options(concurrency_group=SIGNALS).remote(self._sent)

    def close(self) -> None:
        """End the process."""
        if not self._closed:
            self._closed = True
            if self._actor is not None:
                self._ray.kill(self._actor)

    def _call(self, name: str, arguments: tuple[Any, ...], answers: bool) -> Any:
        self._check_open()
        self._sent += 1
        return self._actor.call.remote(self._sent, name, arguments, answers)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The model was closed.")

    def _found(self, reference: Any) -> Any:
        """Return the result of a call; raises `EdgeInferError` with its sentence, or that the node is gone."""
        try:
            found = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._check_open()
            raise self._ended(error) from None
        if isinstance(found, Failure):
            raise error_of(found.kind, f"The stage on {self.where}: {found.sentence}")
        return found

    def _ended(self, error: Exception) -> EdgeInferError:
        return EdgeInferError(f"The stage on {self.where} has ended ({first_sentence(error)}); open the model again.")
