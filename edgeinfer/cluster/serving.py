"""The side of a replica: jobs become requests of its engine, and their texts parts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..engine import Generation
from ..errors import BundleError, CancelledError, EdgeInferError
from ..server import Arrivals
from .handing import Handing, Received
from .job import EMBEDDING, SCORES, TEXT, Done, Facts, Failed, Handed, Identity, Item, Job, Part, Speeds

if TYPE_CHECKING:
    from ..engine import Request
    from ..llm import LLM

PROBES, PROBE_PROMPT, PROBE_TOKENS = 4, 64, 8
"""Runs that measure a replica when it opens, and their tokens."""


def facts_of(llm: LLM) -> Facts:
    """Return the properties of an open model, with speeds that a short run measures."""
    session = llm.session
    return Facts(session.config, session.plan, session.model, session.block_tokens, session.caches_prefixes,
                 session.isa, identity_of(llm), _measured(llm))


def identity_of(llm: LLM) -> Identity:
    """Return what the bits of an open model's answers depend on."""
    return Identity(__version__, llm.session.bundle.identity, llm.session.executor.kernels.arithmetic)


def _measured(llm: LLM) -> Speeds:
    """Return the best speeds of a few short runs, since the first ones map the weights and others may disturb them."""
    ctx = int(llm.runner.config.ctx or 0)
    n = min(PROBE_PROMPT, ctx // 2)
    runs = [llm.complete([1] * n, max_tokens=min(PROBE_TOKENS, ctx - n), temperature=0, ignore_eos=True)
            for _ in range(PROBES)]
    prompt = min(one.ttft_ms or 0 for one in runs) / 1000
    return Speeds(prompt / n, min(one.tpot_ms / 1000 if one.tpot_ms else prompt for one in runs))


class Serving:
    """Runs jobs on a model.

    Parameters
    ----------
    llm : LLM
    """

    def __init__(self, llm: LLM):
        self._llm = llm
        self._running: dict[int, Request[Any]] = {}
        self.handing, self._receiving = Handing(), set[int]()

    async def run(self, job: Job) -> AsyncGenerator[Item, None]:
        """Run a job to its end."""
        received = None
        if job.handed:
            self._receiving.add(job.key)
            received = await self.handing.receive(job.key, job.handed)
            if job.key not in self._receiving:
                yield Failed(CancelledError("The request was cancelled before it began."))
                return
            self._receiving.remove(job.key)
        try:
            async for item in self._run(job, received):
                yield item
        except BundleError:  # the plans are unlike, as in layers with windows: what came is of no use here
            async for item in self._run(job, None):
                yield item
        finally:
            self.handing.drop(job.key)

    async def _run(self, job: Job, received: Received | None) -> AsyncGenerator[Item, None]:
        """Run a job with what was received; raises `BundleError` at its beginning if that cannot be used."""
        try:
            request = self._request(job, received)
        except EdgeInferError as error:
            yield Failed(error)
            return
        self._running[job.key] = request
        try:
            async for item in self._items(request, job):
                yield item._replace(received_bytes=received.nbytes, received_seconds=received.seconds) \
                    if received and isinstance(item, Done) else item
        except EdgeInferError as error:
            if received and isinstance(error, BundleError):
                raise
            yield Failed(error)
        finally:
            request.cancel()
            del self._running[job.key]

    async def prefill(self, job: Job) -> Handed | None:
        """Compute the prompt of a job but for its last token, and keep its KV blocks until they are fetched."""
        path = self.handing.path(job.key)
        try:
            request = self._llm.request(job.ids[:-1], {"max_tokens": 1, "temperature": 0, "prompt_cache": path,
                                                       "reuse": job.options.get("reuse")}, salt=job.salt)
            self._running[job.key], arrivals = request, Arrivals(request)
            request.start_whole()
            while not request.ended:
                await arrivals.wait()
            request.finish()
            return Handed(None, path.stat().st_size, request.task.cached_tokens)
        except (EdgeInferError, OSError):  # there is no room for it, or it was cancelled: the other one computes it
            self.handing.drop(job.key)
            return None
        except BaseException:
            self.cancel(job.key)
            raise
        finally:
            self._running.pop(job.key, None)

    def cancel(self, key: int) -> None:
        """End a job, if it runs, and drop its prompt."""
        with contextlib.suppress(KeyError):
            self._running[key].cancel()
        self._receiving.discard(key)
        self.handing.drop(key)

    def _request(self, job: Job, received: Received | None) -> Request[Any]:
        options = dict(job.options)
        if job.kind == SCORES:
            return self._llm.score_request(job.ids, **options)
        if job.kind == EMBEDDING:
            return self._llm.embed_request(job.ids, **options)
        if job.generated:
            options["generated"] = list(job.generated)
        if received:
            options["prompt_cache"] = self.handing.path(job.key)
        request = self._llm.request(job.ids, options, skip_special=job.skip_special, salt=job.salt)
        request.saves_prompt = False
        return request

    async def _items(self, request: Request[Any], job: Job) -> AsyncIterator[Item]:
        arrivals = Arrivals(request)
        request.every_step = job.kind == TEXT
        reader = Reader(request, len(job.generated)) if job.kind == TEXT else None
        request.start_whole()
        while not request.ended:
            await arrivals.wait()
            if reader and not request.ended and (found := reader.read()):
                yield found
        value = request.finish()  # raises what it ended with
        yield Done(None if reader else value, request.task.cached_tokens, request.task.preemptions,
                   self._llm.state().kv_usage, value.speculation if reader else None,
                   tuple(reader.read()) if reader else ())


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
        """Return what is new."""
        found = []
        for i, sample in enumerate(self._samples):
            if self._ended[i]:
                continue
            part, self._marks[i] = sample.tokens_since(*self._marks[i])
            self._ended[i] = bool(part.finish_reason)
            if part.pieces or part.finish_reason:
                found.append(Part(i, *part))
        return found
