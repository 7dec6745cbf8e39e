"""Conversion of a prompt and options to a request of the engine, with its drafter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..base.validation import FLAG, FUNCTION, PATH, Rule, checked, whole
from ..config import generation_config
from ..errors import RequestError
from .options import Messages, Prompt
from .prompts import Prompts, template_options

if TYPE_CHECKING:
    from ..base.text_form import TextForm
    from ..engine import Completion, PassTimes, Request, Score, Task, Times
    from ..registry import Drafting
    from ..runner import Runner
    from ..runtime import Session
    from ..text import Constraint, GrammarCompiler


T = TypeVar("T")


def _listed(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    return list(value)


def _ids(value: Any) -> list[int]:
    return [whole(one) for one in _listed(value)]


TEXTS_OR_IDS = Rule("a list of texts or of lists of token ids", _listed)
IDS = Rule("a list of token ids", _ids)


class State(NamedTuple):
    """Requests and memory of an open model at one moment."""

    running: int
    """Requests that run."""
    waiting: int
    kv_usage: float
    """Part of the KV blocks that requests hold, from 0 to 1."""
    preemptions: int
    """Number of times that a request gave up its blocks for older ones."""
    planned_bytes: int


class ReplicaState(NamedTuple):
    """A process that runs a model elsewhere, at one moment."""

    name: str
    isa: str
    there: bool
    """True if it answers."""
    requests: int
    """Number of requests that it has."""
    sent: int
    """Number of requests that it got since it was opened."""
    prompt_tok_per_s: float
    tok_per_s: float
    planned_bytes: int
    prefills: bool
    """True if it computes prompts for others."""
    received_bytes: int
    """KV blocks that came from these, and the number planned."""
    expected_bytes: int


class Requests(Prompts):
    """The part of `LLM` that makes requests."""

    elsewhere = False
    """True if other processes run the model."""
    runner: Runner
    draft: Runner | None
    _drafting: Drafting
    _times: Times
    _kept: list[Any]
    """Sequences of the draft, for a request that continues the last one's text."""
    _eos_ids: frozenset[int]
    _grammars: GrammarCompiler | None = None
    """Compiler of grammars, made for the first request that has one."""

    @property
    def lost(self) -> bool:
        """True if a process that has a part of the model has ended, so that only opening it again helps."""
        return not self.elsewhere and any(stage.lost for stage in self.runner.stages)

    @property
    def session(self) -> Session:
        """The runner, where our own kernels run the model; raises `RequestError` if a device of others does."""
        from ..runtime import Session

        if self.runner.stages:
            raise RequestError("The model is split between processes, which give no embeddings and no access to its "
                               "layers; open it without split.")
        if not isinstance(self.runner, Session):
            raise RequestError(f"The model is run by {self.runner.isa}, which gives no embeddings and no access to its "
                               "layers; open it with device cpu.")
        return self.runner

    def state(self) -> State:
        """Return the requests and memory of the model at this moment; from any thread."""
        engine, runner = self._engine, self.runner
        n_blocks = runner.n_blocks
        usage = 1 - runner.available_blocks / n_blocks if n_blocks else 0.0
        return State(engine.n_running, engine.n_waiting, usage, engine.preemptions, runner.plan.total_bytes)

    @property
    def pass_times(self) -> PassTimes:
        """Time of a token in the latest forward passes."""
        return self._engine.pass_times

    def replicas(self) -> list[ReplicaState]:
        """Return the processes that run the model elsewhere."""
        return []

    def request(self, prompt: Prompt, options: Mapping[str, Any], stream: bool = False, *, skip_special: bool = True,
                salt: bytes = b"") -> Request[Completion]:
        """Prepare a request for the continuation of a text; nothing runs before its `start`.

        Parameters
        ----------
        prompt, options : as for `stream`
        stream : refuse options without text before the end
        skip_special : leave special tokens out of the text
        salt : share KV blocks of the prefix cache only with requests of the same salt
        """
        if stream:
            _check_stream(options)
        return self._request(self._ids(prompt), options, skip_special, salt)

    def chat_request(self, messages: Messages, tools: Messages | None, options: Mapping[str, Any],
                     stream: bool = False) -> Request[Completion]:
        """Prepare a request for the answer to a conversation; `reuse` is on unless it is given."""
        if stream:
            _check_stream(options)
        settings, rest = template_options(options)
        return self._request(self.chat_ids(messages, tools, **settings), reusing(rest))

    def _request(self, ids: Iterable[int], options: Mapping[str, Any], skip_special: bool = True,
                 salt: bytes = b"") -> Request[Completion]:
        """Check a request."""
        from ..engine import Generation, Request

        options = dict(options)
        reuse, cache, on_progress, generated = (options.pop(name, None)
                                         for name in ("reuse", "prompt_cache", "progress", "generated"))
        config = generation_config(options)
        reuse = reuse is not None and checked("reuse", reuse, FLAG)
        cache = None if cache is None else Path(checked("prompt_cache", cache, PATH))
        self._engine.check_open()
        if cache is not None and not self.runner.saves_prompts:
            raise RequestError(f"This model cannot keep prompts in files; leave the prompt cache {cache} out.")
        request = self.runner, self._tokenizer, ids, config, self._eos_ids
        task: Task[Completion]
        if config.beams > 1:
            from ..engine import BeamSearch

            task = BeamSearch(*request)
        else:
            drafting = self._drafting.speculation(config, self.runner, self.draft, self._kept, self._times)
            task = Generation(*request, drafting, self._form(config.response_format),
                              () if generated is None else checked("generated", generated, IDS), skip_special)
        task.on_progress = None if on_progress is None else checked("progress", on_progress, FUNCTION)
        return Request(self._engine, task, reuse, cache, salt)

    def _form(self, form: TextForm | None) -> Callable[[], Constraint] | None:
        """Return the function that begins a text of a form."""
        if form is None:
            return None
        if self._grammars is None:
            if self._tokenizer is None:
                raise RequestError("Texts of a given form need a tokenizer, and this bundle has none.")
            from ..text import GrammarCompiler

            self._grammars = GrammarCompiler(self.tokenizer, self.runner.model.vocab_size, self._eos_ids)
        return partial(self._grammars.begin, form)

    def score(self, prompt: Prompt, continuations: Iterable[Prompt]) -> list[Score]:
        """Return how likely the model finds each of several continuations of a prompt.

        The prompt is computed once. A continuation is tokenised by itself, as text that continues in the middle: give
        it with the space that belongs to it (``" good"``). Sampling options have no influence.

        Parameters
        ----------
        prompt : str, or token ids
        continuations : texts, or lists of token ids; each with at least one token

        Returns
        -------
        list of Score
            In the order of the continuations: ``logprobs`` of the tokens, their sum ``logprob``, ``mean_logprob``, and
            whether greedy decoding would write them (``greedy``).

        Raises
        ------
        RequestError
            The prompt or a continuation is empty, or both together do not fit the context.
        CancelledError
            The request was cancelled, or the model was closed meanwhile.

        Examples
        --------
        >>> with LLM("demo") as llm:
        ...     best = max(llm.score("The fox was very", [" hungry", " green"]), key=lambda score: score.logprob)
        """
        return self.score_request(prompt, continuations).finish()

    def score_request(self, prompt: Prompt, continuations: Iterable[Prompt],
                      reuse: bool = False, top: int = 0) -> Request[list[Score]]:
        """Prepare a request for scores, with the `top` likeliest tokens in each place; nothing runs before its `start`.
        """
        from ..engine import Request, Scoring

        given = checked("continuations", continuations, TEXTS_OR_IDS)
        ids = self._ids(prompt)
        listed = [(one, self._continuation_ids(one)) if isinstance(one, str) else (None, self._ids(one))
                  for one in given]
        self._engine.check_open()
        return Request(self._engine, Scoring(self.runner, ids, listed, top), reuse)


def _check_stream(options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a request that has no text, or more than one, before its end."""
    asked = generation_config({name: options.get(name) for name in ("config", "n", "beams")})
    if asked.beams != 1:
        raise RequestError(f"A stream returns text as it is generated, and the best of {asked.beams} beams is known "
                           "only at the end; use complete.")
    if asked.n != 1:
        raise RequestError(f"A stream returns one sample, and n is {asked.n}; use complete.")


def reusing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of which `reuse` is True unless it is given."""
    return {**options, "reuse": True if options.get("reuse") is None else options["reuse"]}


def run_together(requests: Iterable[Request[T]], most: int) -> list[T]:
    """Return the outcomes of requests, of which `most` are handed in at once; if one fails, all are cancelled."""
    pending: deque[Request[T]] = deque()
    done: list[T] = []
    try:
        for request in requests:
            request.start_whole()
            pending.append(request)
            if len(pending) >= most:
                done.append(pending[0].finish())
                pending.popleft()
        while pending:
            done.append(pending[0].finish())
            pending.popleft()
    finally:
        for request in pending:
            request.close()
    return done
