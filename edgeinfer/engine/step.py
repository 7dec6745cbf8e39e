"""One step: a forward pass over the runs that the scheduler chose, with draft tokens, and the outcome for each
request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CancelledError
from ..runner import DECODE
from .generation import Generation
from .pass_times import PassTimes
from .request import Request
from .scheduler import Scheduler, Work, result_of
from .task import Ran, Result, Task
from .verification import verification

if TYPE_CHECKING:
    from ..runner import Runner
    from .candidate import Sample
    from .speculation.controller import Speculation


class PassCancellation:
    """The wish to end a forward pass: no request needs its logits any more, or the engine closes."""

    __slots__ = ("_closed", "_wishes")

    def __init__(self, works: Items[Work], closed: Callable[[], bool]):
        self._wishes = [work.request.task.cancellation for work in works]
        self._closed = closed

    @property
    def asked(self) -> bool:
        """True if the pass is to end."""
        for wish in self._wishes:  # looked at several times in each pass, so without a generator
            if not wish.asked:
                return self._closed()
        return True


class Passed(NamedTuple):
    """A forward pass that is over."""

    works: list[Work]
    results: list[list[Ran]]
    """Results of the runs of each work."""
    learn: Callable[[], None] | None = None
    """Tells the speculation of the pass about it, once its tokens are taken."""


class Steps:
    """Runs the steps of a scheduler's requests.

    Parameters
    ----------
    scheduler : Scheduler
    closed : returns whether the engine is being closed
    """

    def __init__(self, scheduler: Scheduler, closed: Callable[[], bool] = lambda: False):
        self.scheduler, self._runner, self._closed = scheduler, scheduler.runner, closed
        self.passes, self.pass_times = 0, PassTimes()

    def run(self) -> None:
        """Admit requests, run one forward pass, and end the requests that are done."""
        self.drop_cancelled()
        if self.scheduler.waiting:
            for request, error in self.scheduler.admit():
                self._conclude(request, error)
            for request in [one for one in self.scheduler.running if one.task.finished]:  # nothing was left to do
                self._conclude(request)
        self._run_together()
        self._run_alone()

    def _run_together(self) -> None:
        works: list[Work] = []
        try:
            works = self.scheduler.plan()
            if not works:
                return
            began = time.perf_counter()
            passed = self._forward(works, PassCancellation(works, self._closed))
        except CancelledError:
            self.drop_cancelled()
            return
        except Exception as error:  # of the model: it ends all requests with tokens in this pass
            for request in [work.request for work in works] or list(self.scheduler.running):
                self._conclude(request, error)
            return
        if passed.works:
            self._note_time(passed.works, time.perf_counter() - began)
        for work, ran in zip(passed.works, passed.results, strict=True):
            self._take(work.request, ran)
        self.pass_times.took(passed.works, passed.results, time.perf_counter() - began)
        if passed.learn is not None:
            passed.learn()

    def _run_alone(self) -> None:
        """Run a pass of the oldest request that shares none, if there is room for it."""
        request = next((one for one in self.scheduler.running if one.task.passes_alone), None)
        if request is None or not self.scheduler.has_room(request):
            return
        self.passes += 1
        try:
            request.task.run_pass()
        except CancelledError:
            return self.drop_cancelled()
        except Exception as error:
            return self._conclude(request, error)
        if request.task.finished:
            self._conclude(request)

    def drop_cancelled(self) -> None:
        """End requests that were cancelled."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.task.cancellation.asked:
                self._conclude(request)

    def abandon(self, request: Request[Any]) -> None:
        """End a request in whose step an exception came at any line."""
        try:
            request.task.end()
            request.task.release()
        finally:
            self.scheduler.remove(request)
            request.conclude()

    def close(self, error: Exception, failed: bool = False) -> None:
        """End all requests: those that run as cancelled, unless the engine has failed; those that wait with an error.
        """
        for request in tuple(self.scheduler.running):
            self._conclude(request, error if failed else None)
        for request in tuple(self.scheduler.waiting):
            self._conclude(request, error if failed or not request.task.preemptions else None)

    # -- the forward pass --------------------------------------------------------------------------------------------

    def _forward(self, works: list[Work], cancel: Any) -> Passed:
        """Run the model over the tokens of works."""
        self.passes += 1
        if self._runner.prefill_strategy and (whole := self._whole_prompt(works)):
            return whole
        samples = self._samples(works)
        speculation = next((one for work in works if (one := work.request.task.speculation) and not one.idle), None)
        if not samples or speculation is None:
            return self._plain(works, cancel)
        if verified := self._verify(works, speculation, samples, cancel):
            return verified
        passed = self._plain(works, cancel)
        if speculation.idle:
            return passed
        n_tokens = 1 + len(passed.results[0][0].chosen)
        return passed._replace(learn=lambda: speculation.plain(n_tokens))

    def _plain(self, works: list[Work], cancel: Any) -> Passed:
        """Run over the works as they are, or further where each sequence decodes one token."""
        runs = [run for work in works for run in work.runs]
        if not all(len(run.ids) == 1 and run.last and run.role == DECODE and not run.prepare for run in runs):
            return self._mixed(works, cancel)
        sequences, before = [run.sequence for run in runs], [len(run.sequence) for run in runs]
        specs = [run.specs[0] if run.specs else 0 for run in runs]
        further = max(min(work.request.task.further for work in works), 0)
        rows = iter(self._runner.decode(sequences, [run.ids[0] for run in runs], cancel, specs, further))
        chosen = iter([sequence.tokens[n + 1 :] for sequence, n in zip(sequences, before, strict=True)])
        return Passed(works, [result_of(work, rows, [next(chosen) for _ in work.runs]) for work in works])

    def _mixed(self, works: list[Work], cancel: Any) -> Passed:
        rows = iter(self._runner.forward([run.segment(n) for work in works
                                          for run, n in zip(work.runs, work.counts, strict=True) if n], cancel))
        return Passed(works, [result_of(work, rows) for work in works])

    def _whole_prompt(self, works: list[Work]) -> Passed | None:
        """Process a prompt by the runner's own strategy, alone, while the others wait; an error ends its request alone.
        """
        strategy = self._runner.prefill_strategy
        for work in works:
            run = work.runs[0]
            if strategy and run.owner is None and run.last and strategy.takes(run.ids):
                task = work.request.task
                spec = run.specs[0] if run.specs else 0
                try:
                    row = self._runner.prefill(run.sequence, run.ids, task.cancellation, spec, task.telling())
                except BaseException as error:  # its callback may raise anything
                    if isinstance(error, CancelledError) and task.cancellation.asked:
                        raise
                    self._conclude(work.request, error)
                    return Passed([], [])
                return Passed([work], [[Ran(run, len(run.ids), [row])]])
        return None

    # -- draft tokens ------------------------------------------------------------------------------------------------

    @staticmethod
    def _samples(works: list[Work]) -> list[Sample]:
        """Return the samples of a step in which each decodes one token; none beside prompts and other tasks."""
        if not all(isinstance(work.request.task, Generation) for work in works) \
                or any(run.owner is None or len(run.ids) > 1 for work in works for run in work.runs):
            return []
        return [run.owner for work in works for run in work.runs]

    def _room(self, works: list[Work], most: int) -> int:
        """Return how many draft tokens each sequence can be given."""
        left = min(_generation(work).left for work in works)
        return self._runner.room([run.sequence for work in works for run in work.runs], min(left + 1, most)) - 1

    @staticmethod
    def _checking(works: list[Work], proposals: list[list[int]]) -> list[Work]:
        """Return works that verify draft tokens; samples without any decode one token."""
        following, checking = iter(proposals), []
        for work in works:
            runs = [verification(run, one) if (one := next(following)) else run for run in work.runs]
            checking.append(Work(work.request, runs, [len(run.ids) for run in runs]))
        return checking

    def _verify(self, works: list[Work], speculation: Speculation, samples: list[Sample], cancel: Any) -> Passed | None:
        """Run over draft tokens, if there are any."""
        tasks = [_generation(work) for work in works]
        drafting = [task.speculation is speculation for task, work in zip(tasks, works, strict=True) for _ in work.runs]
        proposals = speculation.proposals(
            samples, min(task.left for task in tasks), cancel, lambda: self._room(works, self._runner.config.outputs),
            any(task.needs_each for task in tasks), drafting)
        if not any(proposals):
            return None
        checking = self._checking(works, proposals)
        checked = [run.owner.proposal if run.whole else [] for work in checking for run in work.runs]
        for sample in samples:
            sample.accepted = 0
        passed = self._mixed(checking, cancel)
        return passed._replace(learn=lambda: speculation.verified(checked, [one.accepted for one in samples]))

    # -- outcome ------------------------------------------------------------------------------------------------------

    def _note_time(self, works: list[Work], seconds: float) -> None:
        read = sum(sum(work.counts) for work in works if work.is_prefill)
        self.scheduler.budget.took(sum(len(work.runs) for work in works if not work.is_prefill), read, seconds)

    def _take(self, request: Request[Any], ran: list[Ran]) -> None:
        """Give a task its part of a pass; an error ends only its own request."""
        task = request.task
        try:
            request.emit(task.take(ran))
            if ran and ran[0].run.owner is None:
                task.tell()
                self._save(request)
                self.scheduler.prefixes.share(request, self.scheduler.running)
        except BaseException as error:  # its callback may raise anything
            self._conclude(request, error)
            return
        if task.finished:
            self._conclude(request)

    def _save(self, request: Request[Any]) -> None:
        """Pass on the progress of a prompt; write a complete one to its file, if that has less of it."""
        task, n_prompt = request.task, len(request.task.prompt_ids)
        if request.on_prompt is not None and task.sequence is not None:
            request.on_prompt(task.sequence)
        if request.prompt_cache is not None and request.saves_prompt and request.saved_tokens < n_prompt \
                and not task.preemptions and task.sequence is not None and len(task.sequence) == n_prompt:
            self._runner.save(task.sequence, request.prompt_cache)

    def _conclude(self, request: Request[Any], error: BaseException | None = None) -> None:
        """End a request, release its sequences and notify its client."""
        if request in self.scheduler.waiting and not request.claim():  # who cancelled it has ended it
            self.scheduler.remove(request)
            return
        try:
            if not request.task.finished:
                rest = request.task.end()
                if error is None:
                    request.emit(rest)
            if error is None:
                self.scheduler.prefixes.keep(request)
            request.task.release()
        except Exception as another:
            error = error or another
        finally:
            self.scheduler.remove(request)
            request.conclude(error)


def _generation(work: Work) -> Generation:
    """Return the task of a work in which samples decode."""
    assert isinstance(work.request.task, Generation)
    return work.request.task


def run_alone(task: Task[Result], runner: Runner) -> Result:
    """Run one task to its end in this thread, without an engine, and return its outcome."""
    steps, request = Steps(Scheduler(runner, math.inf)), Request[Result](None, task)
    task.arrive()
    steps.scheduler.add(request)
    while not request.ended:
        steps.run()
    return request.finish()
