"""Repetitions that alternate with readings of the machine, so that each has its own reading before and after it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..base.progress import OnStageProgress
from ..errors import UsageError
from .profile import make_profile
from .results import GENERATE, PROMPT, Case, Measurement, Profile, Row
from .traffic import bytes_per_token, operations_per_token

if TYPE_CHECKING:
    from ..runner import Runner, Sequence
    from ..runtime import Session
    from .probe import MachineProbe

WARM_UP_TOKENS = 16
"""Tokens generated before the clock runs; prompts are processed whole."""


def measure(session: Runner, probe: MachineProbe, cases: list[Case], repetitions: int, profile: bool = False,
            progress: OnStageProgress | None = None) -> Measurement:
    """Run every test several times, and the probe between.

    Parameters
    ----------
    session : Runner
        With a context long enough for all tests.
    probe : MachineProbe
        With the session's threads.
    cases : list of Case
        Those of one depth follow each other, so that its context is processed once.
    repetitions : int
    profile : bool
        Afterwards run each test once more with a clock per instruction.
    progress : callable, optional

    Raises
    ------
    UsageError
        A profile is requested where instructions cannot be timed.
    """
    if profile:
        own(session).executor.check_clock()
    run = _Run(session, probe, progress, len(cases) * (repetitions + 1 + profile))
    rows, profiles = [], []
    for case in cases:
        rows.append(run.row(case, repetitions))
        if profile:
            profiles.append(run.profile(case))
    run.finish()
    return Measurement(tuple(rows), tuple(run.bandwidth), tuple(run.int8_peak), tuple(profiles))


class _Run:
    """A sequence that is filled to each depth once, and the readings so far."""

    def __init__(self, session: Runner, probe: MachineProbe, progress: OnStageProgress | None, total: int):
        self.session, self.probe = session, probe
        self.sequence: Sequence = session.new_sequence()
        self.bandwidth: list[float] = []
        self.int8_peak: list[float] = []
        self._ids = token_ids(session.model.vocab_size)
        self._progress, self._done, self._total = progress, 0, total

    def row(self, case: Case, repetitions: int) -> Row:
        self._tell(f"{case.name} warm-up")
        self._fill(case.depth)
        self._once(_warm_up(case))
        samples, around, peaks = [], [], []
        before = self._read()
        for i in range(repetitions):
            self._tell(f"{case.name} {i + 1}/{repetitions}")
            peak = self._peak() if case.kind == PROMPT else None
            samples.append(case.tokens / self._once(case))
            if peak is not None:
                peaks.append((peak + self._peak()) / 2)
            after = self._read()
            around.append((before + after) / 2)
            before = after
        return Row(case, tuple(samples), tuple(around), tuple(peaks), bytes_per_token(self.session, case),
                   operations_per_token(self.session, case))

    def finish(self) -> None:
        """Take the reading that tests without prompts leave out, and give the blocks back."""
        if not self.int8_peak:
            self._peak()
        self.session.release(self.sequence)

    def profile(self, case: Case) -> Profile:
        self._tell(f"{case.name} profile")
        self._fill(case.depth)
        session = own(self.session)
        executor = session.executor
        executor.start_profile()
        try:
            self._once(case)
        finally:
            nanoseconds = executor.stop_profile()
        return make_profile(session, case, [int(ns) for ns in nanoseconds])

    def _once(self, case: Case) -> float:
        """Return the seconds of one repetition; the sequence is as long as before afterwards."""
        session, sequence = self.session, self.sequence
        ids = [next(self._ids) for _ in range(case.tokens)]
        began = time.perf_counter()
        if case.kind == PROMPT:
            session.prefill(sequence, ids)
        else:
            for token in ids:
                session.decode([sequence], [token])
        seconds = time.perf_counter() - began
        session.rollback(sequence, case.depth)
        return seconds

    def _fill(self, depth: int) -> None:
        if depth < len(self.sequence):
            self.session.rollback(self.sequence, depth)
        if depth > len(self.sequence):
            self.session.prefill(self.sequence, [next(self._ids) for _ in range(depth - len(self.sequence))])
        self.session.checkpoint(self.sequence)

    def _read(self) -> float:
        self.bandwidth.append(self.probe.read_gbs())
        return self.bandwidth[-1]

    def _peak(self) -> float:
        self.int8_peak.append(self.probe.int8_gops())
        return self.int8_peak[-1]

    def _tell(self, item: str) -> None:
        if self._progress:
            self._progress(self._done, self._total, item)
        self._done += 1


def own(runner: Runner) -> Session:
    """Return a runner of our own kernels; raises `UsageError` for another, whose operations have no clock."""
    from ..runtime import Session

    if not isinstance(runner, Session):
        raise UsageError(f"Instructions are those of our own kernels, and {runner.isa} runs the model; leave "
                         "--profile out.")
    return runner


def _warm_up(case: Case) -> Case:
    return Case(case.kind, min(case.tokens, WARM_UP_TOKENS) if case.kind == GENERATE else case.tokens, case.depth)


def token_ids(vocab_size: int) -> Iterator[int]:
    """Yield token ids that repeat after the whole vocabulary: a fixed sequence without visible order."""
    step = next(n for n in range(vocab_size * 5 // 8, 2 * vocab_size) if math.gcd(n, vocab_size) == 1)
    state = 0
    while True:
        state = (state + step) % vocab_size
        yield state
