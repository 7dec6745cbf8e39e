"""Threads of a forward pass: the caller or the helper, one or all; how long threads spin; systems without a futex."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import CancelledError
from edgeinfer.kernels import abi
from edgeinfer.models import demo_path
from edgeinfer.runner import Cancellation
from edgeinfer.runtime import Session
from edgeinfer.runtime.execution import threads as threads_module
from edgeinfer.runtime.execution.thread_tuner import CALLER_NS, LONGEST_INTERVAL, TRIAL, TRIED_NS, ThreadTuner
from tests.helpers.python_kernels import AnyMode, Make, executors, real
from tests.helpers.sessions import logits_of, session, tokens, write_model
from tests.helpers.tasks import within

SIX = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)


@pytest.fixture
def make() -> Iterator[Make]:
    with executors() as build:
        yield build


class CountedFutex:
    """The system's futex, which notes the words that are slept on and woken."""

    def __init__(self) -> None:
        self._real = ctypes.CDLL(None).syscall
        self._real.argtypes = [ctypes.c_int64] * 6
        self.calls: list[tuple[int, bool]] = []
        self._entry = SIX(self._call)
        self.address = ctypes.cast(self._entry, ctypes.c_void_p).value or 0

    def _call(self, number: int, word: int, operation: int, value: int, timeout: int, zero: int) -> int:
        self.calls.append((word, operation == 128))
        return int(self._real(number, word, operation, value, timeout, zero))


@pytest.fixture
def futex(monkeypatch: pytest.MonkeyPatch) -> CountedFutex:
    """The futex of all pools that are made in the test."""
    host = threads_module.host_functions()
    if not host["futex"]:
        pytest.skip("needs Linux's futex")
    counted = CountedFutex()
    monkeypatch.setattr(threads_module, "host_functions", lambda: host | {"futex": counted.address})
    return counted


# -- spinning ----------------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_turns_last_longer_than_a_wake_up() -> None:
    """Whatever a turn takes here; half of that for a clock that has changed since."""
    turns = max(threads_module.spins(real(), 1) for _ in range(10))
    ctx = np.zeros(abi.CTX_BYTES // 8, np.int64)
    spin, taken = real().function("spin"), []
    for _ in range(20):
        began = time.perf_counter_ns()
        spin(turns, ctx.ctypes.data, 0, 1)
        taken.append(time.perf_counter_ns() - began)
    assert min(taken) > threads_module.SPIN_NS / 2
    assert threads_module.spins(real(), 10_000) < turns


@pytest.mark.timing
def test_spinning_in_vain_is_no_trap(make: Make, futex: CountedFutex) -> None:
    """Turns that fell below what threads wait for come back: waits of 1 ms, the most turns are of 30 ms."""
    ctx = np.zeros(abi.CTX_BYTES // 8, np.int64)
    began = time.perf_counter_ns()
    real().function("spin")(10_000, ctx.ctypes.data, 0, 1)
    most = 30_000_000 * 10_000 // (time.perf_counter_ns() - began)
    executor = make(["work"] * 8, 2, work=lambda instruction, tid: time.sleep(1e-3 if tid == instruction % 2 else 0))
    generation = executor.pool.ctx + abi.CTX_GENERATION
    executor.set(abi.CTX_SPINS, most)
    executor.set(abi.CTX_TURNS, 1)
    executor.set(abi.CTX_VAIN, 0)
    executor.run()
    assert (generation, True) in futex.calls, "8 waits in vain"
    for _ in range(8):
        executor.run()
    futex.calls.clear()
    for _ in range(5):
        executor.run()
    assert futex.calls.count((generation, True)) < 10, "of 40 waits"
    assert executor.get(abi.CTX_TURNS) > most / 8
    executor.set(abi.CTX_SPINS, 10)  # whoever spins now gets out of it by one more forward pass
    executor.run()


def test_a_pass_of_one_thread_wakes_no_other(make: Make, futex: CountedFutex) -> None:
    ran: list[int] = []
    executor = make(["work"] * 3, 4, work=lambda instruction, tid: ran.append(tid))
    executor.tuner = one = AnyMode(4)  # type: ignore[assignment]
    one.plan = lambda *forward: (1, True)  # type: ignore[method-assign]
    assert within(60, lambda: [waits for _, waits in futex.calls] == [True] * 4), "the threads fall asleep"
    futex.calls.clear()
    for _ in range(10):
        executor.run()
    assert ran == [0] * 30 and not futex.calls


def test_without_a_futex_threads_take_naps(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows: the same bits."""
    path, ids = write_model(models), tokens(40)
    with session(path, threads=3) as opened:
        expected = logits_of(opened, ids, n_decoded=3).tobytes()
    host = threads_module.host_functions()
    monkeypatch.setattr(threads_module, "host_functions", lambda: host | {"futex": 0})
    with session(path, threads=3) as opened:
        assert logits_of(opened, ids, n_decoded=3).tobytes() == expected


@pytest.mark.timing
def test_threads_that_take_naps_give_the_core_away(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = threads_module.host_functions()
    monkeypatch.setattr(threads_module, "host_functions", lambda: host | {"futex": 0})
    with session(write_model(models), threads=3) as opened:
        logits_of(opened, tokens(40), n_decoded=3)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25, "they give the core away, and get it back at once"


# -- one thread or all, caller or helper -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("threads", [2, 3, 6])
def test_any_order_of_modes_runs_every_instruction_once(make: Make, threads: int) -> None:
    """Threads dawdle; a forward pass of one thread is thread 0's, and the next one of all begins with all of them."""
    log: list[tuple[str, int, int]] = []
    pauses = random.Random(threads)

    def work(instruction: int, tid: int) -> None:
        log.append(("begin", instruction, tid))
        if pauses.random() < 0.2:
            time.sleep(2e-4)
        log.append(("end", instruction, tid))

    executor = make(["work"] * 4, threads, work=work)
    executor.tuner = ways = AnyMode(threads, seed=threads)  # type: ignore[assignment]
    for _ in range(60):
        log.clear()
        executor.run()
        active = ways.planned[0]
        assert len(log) == 2 * 4 * active
        for instruction in range(4):
            part = log[2 * active * instruction : 2 * active * (instruction + 1)]
            for what in ("begin", "end"):
                assert sorted(x for x in part if x[0] == what) == [(what, instruction, tid) for tid in range(active)]


def test_the_mode_changes_no_bit(models: Path) -> None:
    path, ids = write_model(models), tokens(60)
    with session(path, threads=1) as opened:
        expected = logits_of(opened, ids, n_decoded=30).tobytes()
    with session(path, threads=3) as opened:
        opened.executor.tuner = AnyMode(3)  # type: ignore[assignment]
        for _ in range(3):
            assert logits_of(opened, ids, n_decoded=30).tobytes() == expected


def test_short_passes_are_the_callers(make: Make) -> None:
    """Long ones, and the first of a kind, are the helper's, so that Python sees signals meanwhile."""
    import threading

    runners: list[int] = []
    pause = [0.0]

    def work(instruction: int, tid: int) -> None:
        if tid == 0:
            runners.append(threading.get_ident())
        time.sleep(pause[0])

    executor = make(["work"], 2, work=work)
    me = threading.get_ident()
    for pause[0], caller in ((0.0, False), (0.05, None), (0.05, False), (0.0, False)):
        executor.run()
        assert caller is None or (runners[-1] == me) == caller
    executor.tuner.took(1000, 0, 0, 1)  # whatever this machine takes: a short one
    executor.run()
    assert runners[-1] == me
    executor.tuner.took(1000, 0, 0, 1)
    executor.joins = False
    executor.run()
    assert runners[-1] != me


def test_a_cancellation_during_the_callers_pass_counts(make: Make) -> None:
    cancellation = Cancellation()
    executor = make(["work"], 2, work=lambda instruction, tid: cancellation.cancel())
    executor.tuner.took = lambda *forward: None  # type: ignore[method-assign]
    executor.tuner.plan = lambda *forward: (2, True)  # type: ignore[method-assign]
    with pytest.raises(CancelledError):
        executor.run(cancel=cancellation)


# -- the choice --------------------------------------------------------------------------------------------------------


def run_pass(tuner: ThreadTuner, alone: Callable[[int], float], together: Callable[[int], float], n: int) -> list[int]:
    """Threads of n forward passes over one token which take as long as the functions say, in us."""
    chosen = []
    for i in range(n):
        threads, _ = tuner.plan(1)
        tuner.took(int(1000 * (alone if threads == 1 else together)(i)), 1)
        chosen.append(threads)
    return chosen


@pytest.mark.parametrize("small", [True, False])
def test_the_faster_mode_is_found_and_kept(small: bool) -> None:
    noise = random.Random(1)
    for alone, together in ((100, 150), (345, 190), (120, 900)):
        tuner = ThreadTuner(2, choose=True, small=small)
        chosen = run_pass(tuner, lambda i: alone * noise.uniform(0.9, 1.1),  # noqa: B023
                        lambda i: together * noise.uniform(0.9, 1.1), 5000)  # noqa: B023
        best = 1 if alone < together else 2
        assert chosen[:TRIAL] == [1 if small else 2] * TRIAL
        assert chosen.count(best) > 0.99 * len(chosen)
        assert chosen[2 * TRIAL :].count(best) > 0.99 * (len(chosen) - 2 * TRIAL)


def test_the_mode_follows_the_machine() -> None:
    """Another program takes a core away and gives it back."""
    tuner = ThreadTuner(2, choose=True)
    chosen = run_pass(tuner, lambda i: 300, lambda i: 900 if 3000 <= i < 6000 else 200, 12_000)
    assert set(chosen[3010 : 3010 + 50]) == {1}
    assert chosen[3010:6000].count(1) > 0.98 * 2990
    assert chosen[6000 + LONGEST_INTERVAL + 2 * TRIAL :].count(2) > 0.98 * (6000 - LONGEST_INTERVAL - 2 * TRIAL)


def test_a_hopeless_trial_ends_at_once() -> None:
    """Another program has the other core all the time: each forward pass of all threads waits for its turn."""
    chosen = run_pass(ThreadTuner(2, choose=True, small=True), lambda i: 200, lambda i: 20_000, 20_000)
    assert chosen.count(2) < 30


def test_an_outlier_changes_nothing() -> None:
    tuner = ThreadTuner(2, choose=True)
    chosen = run_pass(tuner, lambda i: 300, lambda i: 50_000 if i == 2000 else 200, 2300)
    assert chosen[1990:].count(2) > len(chosen[1990:]) - 2 * TRIAL


def test_long_passes_are_not_tried_with_one_thread() -> None:
    tuner = ThreadTuner(2, choose=True)
    assert set(run_pass(tuner, lambda i: 1, lambda i: TRIED_NS / 1000 + 1, 3000)) == {2}


@pytest.mark.parametrize(("threads", "choose"), [(1, True), (1, False), (4, False)])
def test_asked_for_threads_are_taken(threads: int, choose: bool) -> None:
    tuner = ThreadTuner(threads, choose, small=True)
    assert set(run_pass(tuner, lambda i: 1, lambda i: 100, 500)) == {threads}


def test_kinds_of_passes_are_told_apart() -> None:
    tuner = ThreadTuner(2)
    assert tuner.plan(1) == (2, False)
    tuner.took(1000, 1)
    assert tuner.plan(1) == (2, True)
    assert tuner.plan(100) == (2, False)
    tuner.took(CALLER_NS, 100)
    assert tuner.plan(100) == (2, False) and tuner.plan(70) == (2, False)
    assert tuner.plan(1) == (2, True)
    assert tuner.plan(1, 0, 5) == (2, False), "other instructions"


def test_sessions_choose_threads_unless_fixed() -> None:
    for threads in (None, 2):
        with session(demo_path(), ctx=64, threads=threads) as opened:
            guest = Session(Bundle.open(demo_path()), RuntimeConfig(ctx=64), host=opened)
            try:
                for one in (opened, guest):
                    assert one.executor.tuner.choose == (threads is None)
                    assert one.executor.tuner.plan(1)[0] == (threads or 1), "the demo begins with one thread"
            finally:
                guest.close()
