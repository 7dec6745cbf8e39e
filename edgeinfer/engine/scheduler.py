"""Choose who runs in the next step: admission by free KV blocks, prompts in chunks, and preemption when blocks run out.

Scheduling changes no text: a row of logits depends on its own sequence alone, whatever shares the forward pass and
however a prompt is cut.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import RequestError
from ..runner import DECODE, PROMPT
from .prefix_sharing import PrefixSharing
from .remote_prompts import RemotePrompts
from .request import Request
from .task import Ran, Run, shared
from .token_budget import TokenBudget, urgency

if TYPE_CHECKING:
    from ..runner import Runner, Sequence

RESERVE_TOKENS = 64
"""Tokens of an answer for which a request that enters must find blocks."""


class Work(NamedTuple):
    """Runs of a request in a step."""

    request: Request[Any]
    runs: list[Run]
    counts: list[int]
    """Tokens of each run."""

    @property
    def is_prefill(self) -> bool:
        """True for a part of a prompt, or of tokens that a preemption dropped."""
        return prefilling(self.runs)


class Scheduler:
    """Requests that wait and run. It belongs to the thread that runs the model.

    Parameters
    ----------
    runner : Runner
    max_itl : see `TokenBudget`

    Attributes
    ----------
    waiting, running : list of Request
        In order of arrival.
    remote : RemotePrompts
        Prompts that others compute.
    preemptions : int
        How often a request gave up its blocks.
    """

    def __init__(self, runner: Runner, max_itl: float):
        self.runner = runner
        self.budget = TokenBudget(max_itl, runner.config.prefill_chunk)
        self.prefixes, self.remote = PrefixSharing(runner), RemotePrompts(runner)
        self.waiting: list[Request[Any]] = []
        self.running: list[Request[Any]] = []
        self.preemptions = 0
        self._retry = False
        """True if blocks may have become free since the first waiting request did not fit."""

    def add(self, request: Request[Any]) -> None:
        """Let a request wait."""
        request.arrived, self._retry = time.monotonic(), True
        self.waiting.append(request)

    def remove(self, request: Request[Any]) -> None:
        """Remove a request; its blocks may be needed by others."""
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)
        self.prefixes.forget(request)
        self._retry = True

    # -- admission ---------------------------------------------------------------------------------------------------

    def admit(self) -> list[tuple[Request[Any], BaseException]]:
        """Let waiting requests in, in order of arrival, as long as their prompts and answers find blocks.

        Returns those that failed, with their errors.
        """
        failed: list[tuple[Request[Any], BaseException]] = []
        while self.waiting and self._retry:
            request = self.waiting[0]
            if not self._has_sequences(request):
                break
            if not request.claim():  # who cancelled it has ended it
                self.waiting.pop(0)
                continue
            try:
                entered = self._enter(request)
            except BaseException as error:  # its callback may raise anything, and no other request is to end with it
                self.waiting.pop(0)
                failed.append((request, error))
                continue
            if not entered:
                request.requeue()
                break
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda one: one.number)
        self._retry = False
        return failed

    def _has_sequences(self, request: Request[Any]) -> bool:
        held = sum(one.task.n_sequences for one in self.running)
        return held + request.task.n_sequences <= self.runner.config.max_sequences

    def _enter(self, request: Request[Any]) -> bool:
        """Begin a request if the pools have room for it beside the needs of running ones."""
        task = request.task
        try:
            sequence = self._first_sequence(request)
        except RequestError:  # no room for its prompt cache
            if not self.running:
                raise
            return False
        wanted = [(sequence, self._growth(request, len(sequence)))]
        wanted += [(one.task.sequence, self._growth(one, len(one.task.sequence))) for one in self.running
                   if one.task.sequence is not None]
        if self.running and not self.runner.fits(wanted):
            if not self.remote.keep(request.remote_prompt, sequence):
                self.runner.release(sequence)
            return False
        task.begin(sequence)
        task.join([one.task for one in self.running])
        if not request.task.preemptions:
            task.tell()
        return True

    @staticmethod
    def _growth(request: Request[Any], held: int) -> int:
        """Return how many tokens a request is expected to add soon: its prompt, and a part of its answers."""
        task = request.task
        left = len(task.known_ids) - held
        reserved = min(task.most_tokens, RESERVE_TOKENS)
        return max(left, 0) + (reserved * task.n_sequences if left > 1 else 0)

    def _first_sequence(self, request: Request[Any]) -> Sequence:
        """Return a sequence that holds a proper prefix of the request's tokens, if one is kept somewhere."""
        ids = request.task.known_ids
        if request.remote_prompt is not None and (arrived := self.remote.take(request.remote_prompt)) is not None:
            return arrived
        file = request.prompt_cache
        if file is not None and not request.task.preemptions and os.path.exists(file):
            sequence = self.runner.load(file)
            saved = shared(sequence.tokens, ids, len(ids))
            kept = self.runner.can_truncate(sequence, min(saved, len(ids) - 1))
            self.runner.truncate(sequence, kept)
            # layers with a window may lack rows that the prompt sees: then it is saved again
            request.saved_tokens = saved if kept == min(saved, len(ids) - 1) else kept
            return sequence
        return self.runner.from_prefix(ids, request.salt) if request.reuse else self.runner.new_sequence()

    # -- the next step -----------------------------------------------------------------------------------------------

    def plan(self) -> list[Work]:
        """Return the work of the next forward pass, the decoding requests first.

        Where blocks are short, prompts wait, and then the youngest request is preempted. The oldest always continues.
        """
        while self.running:
            works = self._compose()
            while not self.runner.fits(_wanted(works)):
                if len(works) < 2 or not works[-1].is_prefill:
                    break
                works.pop()
            else:
                return works
            if self.remote.give_back_one():
                continue
            if len(self.running) == 1:  # it has room, or the forward pass says why not
                return works
            self.preempt(self.running[-1])
        return []

    def has_room(self, request: Request[Any]) -> bool:
        """Return whether there are blocks for a pass over this request alone, or no other request will free any."""
        sequence = request.task.sequence
        if sequence is None:
            return False
        while not self.runner.fits([(sequence, request.task.next_tokens())]):
            if not self.remote.give_back_one():
                return len(self.running) == 1
        return True

    def _compose(self) -> list[Work]:
        """Return all decodes, and as many prompt tokens as the step has time for."""
        decodes: list[tuple[Request[Any], list[Run]]] = []
        prompts: list[tuple[Request[Any], list[Run]]] = []
        for request in self.running:
            if request.task.passes_alone:
                continue
            runs = request.task.runs()
            (prompts if prefilling(runs) else decodes).append((request, runs))
        rows = self.runner.config.outputs - sum(len(runs) for _, runs in decodes) - len(prompts)
        works: list[Work] = []
        for request, runs in decodes:
            counts = [min(len(run.ids), 1 + max(rows, 0)) if run.each else len(run.ids) for run in runs]
            rows -= sum(counts) - len(counts)
            works.append(Work(request, runs, counts))
        return works + self._chunks(prompts, sum(sum(work.counts) for work in works))

    def _chunks(self, prompts: list[tuple[Request[Any], list[Run]]], decoding: int) -> list[Work]:
        """Share the prompt tokens of a step: short prompts first, and the longer one waits the sooner it comes."""
        if not prompts:
            return []
        left = {role: self.runner.pass_tokens(role) - decoding for role in (PROMPT, DECODE)}
        budget, now = min(self.budget.prompt_tokens(decoding), left[PROMPT]), time.monotonic()
        works: list[Work] = []
        for request, runs in sorted(prompts, key=lambda one: urgency(_length(one[1]), now - one[0].arrived)):
            if budget <= 0:
                break
            if self.prefixes.follows(request, [other for other, _ in prompts]):
                continue
            counts = []
            for run in runs:
                n = min(len(run.ids), budget, left[run.role])
                budget, left[DECODE] = budget - n, left[DECODE] - n * (run.role == DECODE)
                counts.append(n)
            if any(counts):
                works.append(Work(request, runs, counts))
        return works

    def preempt(self, request: Request[Any]) -> None:
        """Take a request's blocks; it waits again, before all that arrived later, and computes them again."""
        import logging  # here: most runs preempt nothing, and the import takes milliseconds

        task, held = request.task, request.task.sequence
        n_tokens = 0 if held is None else len(held)
        self.prefixes.keep(request)
        task.release()
        self.running.remove(request)
        self.waiting.append(request)
        self.waiting.sort(key=lambda one: one.number)
        task.preemptions += 1
        self.preemptions += 1
        logging.getLogger(__name__).info("Request %d was preempted at %d tokens; %d KV blocks are free.",
                                         request.number, n_tokens, self.runner.free_blocks)
        request.requeue()


def prefilling(runs: Items[Run]) -> bool:
    """Return whether runs may be cut into chunks: those of a prompt, or of tokens that a preemption dropped."""
    return any(not run.last or len(run.ids) > 1 for run in runs) and not any(run.each for run in runs)


def _length(runs: list[Run]) -> int:
    return sum(len(run.ids) for run in runs)


def _wanted(works: Items[Work]) -> list[tuple[Sequence, int]]:
    return [(run.sequence, n) for work in works for run, n in zip(work.runs, work.counts, strict=True) if n]


def result_of(work: Work, rows: Iterator[Any], chosen: Items[Items[int]] = ()) -> list[Ran]:
    """Return the outcome of the runs of a request, taking the rows of logits in order."""
    found = []
    for number, (run, n) in enumerate(zip(work.runs, work.counts, strict=True)):
        n_rows = n if run.each else int(run.last and n == len(run.ids))
        found.append(Ran(run, n, list(islice(rows, n_rows)), chosen[number] if chosen else ()))
    return found
