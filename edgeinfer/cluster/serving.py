"""The side of a replica: jobs become requests of its engine, and their texts parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from edgeinfer.kernels import abi

from .. import __version__
from ..config import CPU
from ..engine import Generation
from ..errors import CancelledError, EdgeInferError
from ..server import Arrivals
from .handing import Handing, Incoming, Outgoing
from .job import EMBEDDING, SCORES, TEXT, Done, Facts, Failed, Identity, Item, Job, Part, Prefilled, Speeds, WorkerLost

if TYPE_CHECKING:
    from ..engine import Request
    from ..llm import LLM
    from ..runner import Sequence

PROBES, PROBE_PROMPT, PROBE_TOKENS = 4, 64, 8
"""Runs that measure a replica when it opens, and their tokens."""
AHEAD = 8
"""Parts of a prompt that may wait until they are written."""


def facts_of(llm: LLM) -> Facts:
    """Return the properties of an open model, with speeds that a short run measures."""
    runner = llm.runner
    return Facts(runner.config, runner.plan, runner.model, runner.block_tokens, runner.caches_prefixes, runner.isa,
                 identity_of(llm), _measured(llm), runner.device, runner.block_form)


def identity_of(llm: LLM) -> Identity:
    """Return the identity that the bits of an open model's answers depend on."""
    runner = llm.runner
    arithmetic = llm.session.executor.kernels.arithmetic if runner.device == CPU else runner.isa
    return Identity(__version__, runner.bundle.identity, arithmetic)


def _measured(llm: LLM) -> Speeds:
    """Return the best speeds of a few short runs, since the first ones map the weights and others may disturb them."""
    ctx = int(llm.runner.config.ctx or 0)
    n = min(PROBE_PROMPT, ctx // 2)
    runs = [llm.complete([1] * n, max_tokens=min(PROBE_TOKENS, ctx - n), temperature=0, ignore_eos=True)
            for _ in range(PROBES)]
    prompt = min(one.ttft_ms or 0 for one in runs) / 1000
    found = Speeds(prompt / n, min(one.tpot_ms / 1000 if one.tpot_ms else prompt for one in runs))
    llm.pass_times.set(found.prompt, found.decode)
    return found


class Serving:
    """Runs jobs on a model."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._running: dict[int, Request[Any]] = {}
        self._computing: dict[int, asyncio.Task[Prefilled | None]] = {}
        self.handing = Handing()

    async def run(self, job: Job) -> AsyncGenerator[Item, None]:
        """Run a job to its end."""
        try:
            request = self._request(job)
        except EdgeInferError as error:
            yield Failed(error)
            return
        self._running[job.key] = request
        try:
            received = await self._receive(request, job) if job.handed else None
            if request.ended:
                yield Failed(CancelledError("The request was cancelled before it began."))
                return
            async for item in self._items(request, job):
                yield item._replace(received_bytes=received.nbytes, received_seconds=received.seconds) \
                    if received and isinstance(item, Done) else item
        except EdgeInferError as error:
            yield Failed(error)
        finally:
            request.cancel()
            del self._running[job.key]

    async def _receive(self, request: Request[Any], job: Job) -> Incoming | None:
        """Let the KV blocks of a prompt be written as they come; None if it is to be computed here."""
        incoming, writing = Incoming(job.handed, lambda: request.ended), deque[asyncio.Event]()
        try:
            async for part in incoming.parts():
                writing.append(_written(request, part))
                if len(writing) > AHEAD:
                    await writing.popleft().wait()
                if _failed(request):
                    break
            for one in writing:
                await one.wait()
            if not _failed(request):
                return incoming
        except WorkerLost:  # the link is down, or the other one has failed
            pass
        except BaseException:
            _written(request, None)
            raise
        await _written(request, None).wait()
        return None

    def prefill(self, job: Job) -> bool:
        """Begin to compute the prompt of a job but for its last token; returns whether that is possible."""
        runner, sent = self._llm.runner, 0
        try:
            request = self._llm.request(job.ids[:-1], {"max_tokens": 1, "temperature": 0,
                                                       "reuse": job.options.get("reuse")}, salt=job.salt)
            leaving = self.handing.begin(job.key)
        except (EdgeInferError, OSError):
            return False

        def send(sequence: Sequence) -> None:
            nonlocal sent
            complete = len(sequence) == len(job.ids) - 1
            for part in runner.read_blocks(sequence, sent, complete, job.form):
                leaving.add(part)
            sent = max(sent, len(sequence) // abi.BLOCK_TOKENS)

        request.on_prompt, self._running[job.key] = send, request
        self._computing[job.key] = asyncio.ensure_future(self._compute(request, leaving, job.key))
        return True

    async def _compute(self, request: Request[Any], leaving: Outgoing, key: int) -> Prefilled | None:
        arrivals = Arrivals(request)
        try:
            request.start_whole()
            while not request.ended:
                await arrivals.wait()
            cancelled = request.finish().choices[0].finish_reason == "cancelled"
            leaving.end(failed=cancelled)
            return None if cancelled else Prefilled(request.task.cached_tokens, self._speeds())
        except (EdgeInferError, OSError):  # there is no room for it: the other one computes it
            leaving.end(failed=True)
            return None
        finally:
            request.cancel()
            self._running.pop(key, None)

    async def prefilled(self, key: int) -> Prefilled | None:
        """Return when a prompt that was begun is complete; None if it could not be computed."""
        return await asyncio.shield(self._computing[key]) if key in self._computing else None

    def cancel(self, key: int) -> None:
        """End a job, if it runs, and drop its prompt."""
        with contextlib.suppress(KeyError):
            self._running[key].cancel()
        self._computing.pop(key, None)
        self.handing.drop(key)

    def _request(self, job: Job) -> Request[Any]:
        options = dict(job.options)
        if job.kind == SCORES:
            return self._llm.score_request(job.ids, **options)
        if job.kind == EMBEDDING:
            return self._llm.embed_request(job.ids, **options)
        if job.generated:
            options["generated"] = list(job.generated)
        return self._llm.request(job.ids, options, skip_special=job.skip_special, salt=job.salt)

    async def _items(self, request: Request[Any], job: Job) -> AsyncIterator[Item]:
        arrivals = Arrivals(request)
        request.every_step = job.kind == TEXT
        reader = Reader(request, len(job.generated)) if job.kind == TEXT else None
        request.start_whole()
        while not request.ended:
            await arrivals.wait()
            if reader and not request.ended and (found := reader.read()):
                yield found
        value = request.finish()  # raises the error that it ended with
        yield Done(None if reader else value, request.task.cached_tokens, request.task.preemptions,
                   self._llm.state().kv_usage, value.speculation if reader else None,
                   tuple(reader.read()) if reader else (), speeds=self._speeds())

    def _speeds(self) -> Speeds:
        pass_times = self._llm.pass_times
        return Speeds(pass_times.prompt, pass_times.decode)


def _written(request: Request[Any], part: memoryview | None) -> asyncio.Event:
    """Return an event that is set when a part of a prompt is in its blocks, or when these are freed."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(told.set)

    request.receive(part, tell)
    return told


def _failed(request: Request[Any]) -> bool:
    """Return whether the rest of a prompt is of no use any more."""
    return request.ended or (request.remote_prompt is not None and request.remote_prompt.error is not None)


class Reader:
    """Reads the samples of a generation token by token.

    Parameters
    ----------
    request : of a `Generation`
    generated : tokens that the client has
    """

    def __init__(self, request: Request[Any], generated: int):
        assert isinstance(request.task, Generation)
        self._samples = request.task.samples
        self._marks = [(generated, generated, 0)] * len(self._samples)
        self._ended = [False] * len(self._samples)

    def read(self) -> list[Part]:
        """Return the new parts."""
        found = []
        for i, sample in enumerate(self._samples):
            if self._ended[i]:
                continue
            part, self._marks[i] = sample.tokens_since(*self._marks[i])
            self._ended[i] = bool(part.finish_reason)
            if part.pieces or part.finish_reason:
                found.append(Part(i, *part))
        return found
