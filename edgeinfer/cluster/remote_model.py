"""A model whose replicas run elsewhere: prompts are prepared here, and forward passes run there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import generation_config
from ..engine import Request
from ..llm import Embeddings, ReplicaState, State
from ..models import Storage, resolve
from .remote_engine import RemoteEngine
from .tasks import RemoteEmbedding, RemoteGeneration, RemoteScoring

if TYPE_CHECKING:
    from edgeinfer.memory_planner import MemoryPlan

    from ..engine import Score
    from .job import Replica


class RemoteModel(Embeddings):
    """The part of `LLM` that a server uses, on replicas.

    Parameters
    ----------
    source : the model, as `LLM` takes it; its tokenizer and chat template are read here
    replicas : those that are open
    max_queue : requests that may wait
    say : gets a sentence for each replica that is lost or comes back
    ended : called when it is closed
    weights, group_size : how a checkpoint was stored
    helping : how many of the first replicas compute prompts for the others
    """

    elsewhere = True

    def __init__(self, source: str, replicas: list[Replica], max_queue: int, say: Callable[[str], object],
                 ended: Callable[[], None], weights: Any = None, group_size: Any = None, helping: int = 0):
        from ..bundle import Bundle
        from ..text import ChatTemplate, Tokenizer

        self.name = source
        self.path: Path = resolve(source, storage=Storage(weights, group_size))
        bundle = Bundle.open(self.path)
        try:
            self._tokenizer = Tokenizer.of_model(self.path, bundle.files, bundle.config)
        finally:
            bundle.close()
        self.chat_template = ChatTemplate.open(self.path)
        self._remote = RemoteEngine(replicas, max_queue, say, helping)
        self._engine, self._ended = self._remote, ended  # type: ignore[assignment]
        self.runner, self.draft = self._remote.runner, None  # type: ignore[assignment]
        self._preparing = set()
        self._eos_ids = frozenset(self.runner.model.eos_token_ids)
        if self._tokenizer:
            self._eos_ids |= self._tokenizer.eos_ids

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan of the smallest replica."""
        return self.runner.plan

    @property
    def engine(self) -> RemoteEngine:
        """The requests and the replicas."""
        return self._remote

    def state(self) -> State:
        """Return the requests and memory of all replicas together."""
        one = self._remote
        planned = sum(place.facts.plan.total_bytes for place in one.places if place.there)
        return State(one.n_running, one.n_waiting, one.kv_usage, one.preemptions, planned)

    def replicas(self) -> list[ReplicaState]:
        """Return the replicas as the router knows them."""
        return [ReplicaState(one.name, one.facts.isa, one.there, len(one.work), one.sent, 1 / one.speeds.prompt,
                             1 / one.speeds.decode, one.facts.plan.total_bytes, one.helps, one.received_bytes,
                             one.expected_bytes) for one in self._remote.places]

    def _request(self, ids: Iterable[int], options: Mapping[str, Any], skip_special: bool = True,
                 salt: bytes = b"") -> Request[Any]:
        options = dict(options)
        reuse = bool(options.pop("reuse", None))
        config = generation_config(options)
        self._engine.check_open()
        if begin := self._form(config.response_format):
            begin()  # refuses a wrong form here
        task = RemoteGeneration(self._remote.runner, self._tokenizer, ids, config, self._eos_ids, reuse, skip_special)
        return Request(self._engine, task, reuse, None, salt)

    def score_request(self, prompt: Any, continuations: Iterable[Any], reuse: bool = False,
                      top: int = 0) -> Request[list[Score]]:
        """Prepare a request for scores."""
        self._engine.check_open()
        task = RemoteScoring(self._remote.runner, self._ids(prompt), [(None, self._ids(one)) for one in continuations],
                             top, reuse)
        return Request(self._engine, task, reuse)

    def embed_request(self, text: Any, pooling: str = "mean", normalize: bool = True) -> Request[Any]:
        """Prepare a request for one embedding."""
        self._engine.check_open()
        return Request(self._engine, RemoteEmbedding(self._remote.runner, self._ids(text), pooling, normalize))

    def close(self) -> None:
        """End all requests and the replicas."""
        self._remote.close()
        self._ended()
