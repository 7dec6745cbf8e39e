"""The executor: every thread runs every instruction once, in order; skip, cancel and error reach all; threads come and
go.

Kernels here are mostly Python functions behind addresses: the executor calls whatever an instruction points to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.errors import CancelledError, ClosedError, EdgeInferError, KernelError, UsageError
from edgeinfer.graph import ModelConfig
from edgeinfer.kernels import abi
from edgeinfer.runner import Cancellation
from edgeinfer.runtime.execution import threads as threads_module
from tests.helpers.command_line import listening
from tests.helpers.python_kernels import COUNT_FREE, Make, executors
from tests.helpers.sessions import free_blocks, logits_of, own_threads, session, tokens, write_model
from tests.helpers.tasks import within

ROOT = Path(__file__).resolve().parents[2]
LONG = ModelConfig(
    "llama", vocab_size=2000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, head_dim=64, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=2048,
)
"""100 million weights: a prompt takes long enough to be interrupted."""


@pytest.fixture
def make() -> Iterator[Make]:
    with executors() as build:
        yield build


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_thread_runs_every_instruction_once_and_in_order(make: Make, threads: int) -> None:
    """Some threads dawdle; nobody starts an instruction before all have ended the one before."""
    log: list[tuple[str, int, int]] = []
    rng = np.random.default_rng(threads)
    pauses = iter(rng.choice([0, 0, 0, 2e-4], 100_000))

    def work(instruction: int, tid: int) -> None:
        log.append(("begin", instruction, tid))
        if pause := next(pauses):
            time.sleep(pause)
        log.append(("end", instruction, tid))

    executor = make(["work"] * 5, threads, work=work)
    for _ in range(30):
        log.clear()
        executor.run()
        assert len(log) == 2 * 5 * threads
        for instruction in range(5):
            part = log[2 * threads * instruction : 2 * threads * (instruction + 1)]
            for what in ("begin", "end"):
                assert sorted(x for x in part if x[0] == what) == [(what, instruction, tid) for tid in range(threads)]


@pytest.mark.parametrize("threads", [1, 3])
def test_instructions_are_skipped_where_their_count_is_zero(make: Make, threads: int) -> None:
    """An instruction may set the count that the next one depends on: the decision falls at the barrier between them."""
    ran: list[int] = []

    def log(instruction: int, tid: int) -> None:
        if tid == 0:
            ran.append(instruction)

    def set_kept(instruction: int, tid: int) -> None:
        log(instruction, tid)
        if tid == 0:
            executor.set_count(COUNT_FREE, kept)

    executor = make(
        [("log", abi.COUNT_MERGE), ("set_kept", None), ("log", COUNT_FREE), ("log", abi.COUNT_MERGE),
         ("log", abi.COUNT_TOKENS)], threads, log=log, set_kept=set_kept,
    )  # fmt: skip
    for merge, kept, n_tokens, expected in [  # noqa: B007
        (0, 0, 0, [1]), (0, 1, 0, [1, 2]), (7, 0, 0, [0, 1, 3]), (-1, 5, 9, [0, 1, 2, 3, 4]), (0, 0, 1, [1, 4]),
    ]:  # fmt: skip
        executor.set_count(abi.COUNT_MERGE, merge)
        executor.set_count(abi.COUNT_TOKENS, n_tokens)
        ran.clear()
        executor.run()
        assert ran == expected


def test_a_pass_in_which_all_is_skipped_ends(make: Make) -> None:
    ran: list[int] = []
    executor = make([("log", abi.COUNT_TOKENS)] * 3, 2, log=lambda instruction, tid: ran.append(instruction))
    for n in (0, 0, 1, 0, 1):
        executor.set_count(abi.COUNT_TOKENS, n)
        ran.clear()
        executor.run()
        assert ran == [0, 0, 1, 1, 2, 2] * n


def test_a_program_without_instructions_ends(make: Make) -> None:
    executor = make([], 2)
    executor.run()


def test_a_kernel_that_fails_ends_the_pass(make: Make) -> None:
    """One thread's status is enough; the next forward pass is as good as the first."""
    ran: list[int] = []
    fails = [True]

    def work(instruction: int, tid: int) -> int:
        ran.append(instruction)
        return 5 if fails[0] and (instruction, tid) == (1, 2) else 0

    executor = make(["work"] * 4, 3, work=work)
    for fails[0], n in ((True, 2), (False, 4), (True, 2), (True, 2), (False, 4)):
        ran.clear()
        if fails[0]:
            with pytest.raises(KernelError, match=r"^A kernel failed with status 5\.$"):
                executor.run()
        else:
            executor.run()
        assert sorted(ran) == sorted(3 * list(range(n)))


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_cancelled_pass_ends_at_the_barrier(make: Make) -> None:
    ran: list[int] = []
    cancels = [1]

    def work(instruction: int, tid: int) -> None:
        ran.append(instruction)
        if (instruction, tid) == (cancels[0], 1):
            cancellation.cancel()
            if instruction == 1:  # whoever waits for the pass looks every WAIT_SECONDS
                assert within(60, lambda: executor.pool.words[abi.CTX_CANCEL >> 3] != 0)

    executor = make(["work"] * 4, 2, work=work)
    for cancels[0], expected in ((1, [0, 0, 1, 1]), (-1, [0, 0, 1, 1, 2, 2, 3, 3]), (3, [0, 0, 1, 1, 2, 2, 3, 3])):
        ran.clear()
        cancellation = Cancellation()
        if cancels[0] < 0:
            executor.run(cancel=cancellation)
        else:
            with pytest.raises(CancelledError, match=r"^The run was cancelled\.$"):
                executor.run(cancel=cancellation)
        assert ran == expected


def test_a_cancellation_reaches_its_own_passes_only(make: Make) -> None:
    """One that comes first holds for all forward passes that it is given to, and for no other."""
    ran: list[int] = []
    executor = make(["work"], 2, work=lambda instruction, tid: ran.append(instruction))
    cancelled, other = Cancellation(), Cancellation()
    cancelled.cancel()
    for _ in range(2):
        with pytest.raises(CancelledError):
            executor.run(cancel=cancelled)
    assert ran == []
    executor.run(cancel=other)
    executor.run()
    assert ran == [0, 0, 0, 0]


def test_a_kernel_of_many_chunks_stops_within(make: Make) -> None:
    """An instruction that was left half done counts as cancelled."""

    def abandon(instruction: int, tid: int) -> None:
        executor.set(abi.CTX_ERROR, abi.ABANDONED)  # as `claim` leaves it

    executor = make(["abandon"], 2, abandon=abandon)
    with pytest.raises(CancelledError):
        executor.run()


@pytest.mark.timing
def test_a_long_prompt_is_cancelled_within_100_ms(models: Path) -> None:
    """From another thread; the chunk that was cut leaves no trace, and what came before it stays."""
    path, ids = write_model(models / "long", LONG), tokens(1500, vocab_size=LONG.vocab_size)
    with session(path, threads=2, prefill_chunk=512, kv="f16") as opened:
        expected = logits_of(opened, ids[:40]).tobytes()
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids[:20])
        for delay in (0.001, 0.02, 0.05, 0.1):
            sent: list[float] = []
            cancellation = Cancellation()

            def cancel(delay: float = delay, sent: list[float] = sent, one: Cancellation = cancellation) -> None:
                time.sleep(delay)
                sent.append(time.perf_counter())
                one.cancel()

            thread = threading.Thread(target=cancel)
            thread.start()
            with pytest.raises(CancelledError):
                opened.prefill(sequence, ids[20:], cancellation)
            late = time.perf_counter() - sent[0]
            thread.join()
            assert late < 0.1
            done = len(sequence)
            assert done % 512 == 20 and sequence.tokens == ids[:done]
            assert opened.plan.kv_blocks - free_blocks(opened) == len(sequence.blocks) == -(-done // 16)
            opened.truncate(sequence, 20)
        assert opened.prefill(sequence, ids[20:40]).tobytes() == expected


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "mode", ["passes", "modes", "open_close", "drop", "leave", "fork", "fork_importing", "fork_holding", "interrupts",
             pytest.param("ctrl_c", marks=pytest.mark.timing), "flow"]
)
def test_in_a_process_of_its_own(mode: str, models: Path) -> None:
    """See tests/stress.py: a barrier that strands a thread shows as a timeout, memory that is gone as a crash."""
    if mode == "flow" and not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    if mode in ("fork", "fork_importing", "fork_holding", "interrupts", "ctrl_c") and os.name != "posix":
        pytest.skip("needs POSIX signals and fork")
    path = write_model(models / "long", LONG) if mode == "ctrl_c" else write_model(models)
    run = subprocess.run(
        [sys.executable, "-m", "tests.stress", mode, str(path)], cwd=ROOT, timeout=600, capture_output=True, text=True,
        preexec_fn=listening if os.name == "posix" else None,
    )
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}\n{run.stderr}"


@pytest.mark.parametrize("threads", [2, 7])
@pytest.mark.timing
def test_idle_threads_sleep(models: Path, threads: int) -> None:
    with session(write_model(models), threads=threads) as opened:
        logits_of(opened, tokens(40), n_decoded=3)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05


def test_closing_twice_and_using_what_is_closed(make: Make, models: Path) -> None:
    executor = make(["work"], 2, work=lambda instruction, tid: 0)
    executor.run()
    before = own_threads()
    with executor:
        executor.run()
    assert own_threads() == before - 2
    executor.close()
    with pytest.raises(ClosedError, match=r"^The model was closed; open it again\.$"):
        executor.run()
    with session(write_model(models)) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(20))
        opened.close()
        opened.close()
        for use in (lambda: opened.prefill(sequence, [1]), lambda: opened.decode([sequence], [1]),
                    lambda: next(opened.score(sequence, [1]))):  # fmt: skip
            with pytest.raises(ClosedError):
                use()


def test_closing_gives_the_memory_back_while_the_session_is_referenced(models: Path) -> None:
    import psutil

    process = psutil.Process()
    with session(write_model(models), ctx=1024, kv="f32", max_sequences=64) as opened:
        nbytes = opened.plan.region("kv").nbytes
        assert nbytes > 30e6
        opened.settle()  # the KV pool gets its pages in the background
        before = process.memory_info().rss
        opened.close()
        assert before - process.memory_info().rss > 0.8 * nbytes


def test_closing_from_another_thread_cancels_what_runs(make: Make) -> None:
    begun = threading.Event()

    def work(instruction: int, tid: int) -> None:
        begun.set()
        assert within(60, lambda: executor.ended(None))

    executor = make(["work"] * 1000, 2, work=work)
    close = threading.Thread(target=lambda: begun.wait(60) and executor.close())
    close.start()
    with pytest.raises((CancelledError, ClosedError)):
        executor.run()
    close.join()


def test_threads_that_the_system_refuses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    start, n = threading.Thread.start, [0]

    def refuse(self: threading.Thread) -> None:
        n[0] += 1
        if n[0] > 2:
            raise RuntimeError("can't start new thread")
        start(self)

    before = own_threads()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(EdgeInferError, match=r"^The system refuses 4 threads \(can't start new thread\); lower --thr"):
        make(["work"], 4, work=lambda instruction, tid: 0)
    assert own_threads() == before


# -- profile -----------------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_the_profile_has_the_time_of_each_instruction(make: Make) -> None:
    executor = make(
        ["quick", "slow", ("slow", abi.COUNT_MERGE), "quick"], 2, quick=lambda instruction, tid: 0,
        slow=lambda instruction, tid: time.sleep(5e-3),
    )  # fmt: skip
    executor.run()
    executor.start_profile()
    begin = time.perf_counter_ns()
    for _ in range(4):
        executor.run()
    wall = time.perf_counter_ns() - begin
    profile = executor.stop_profile()
    assert profile.shape == (4,)
    assert profile[1] >= 4 * 5e6 and profile[2] == 0
    assert profile[0] > 0 and profile[3] > 0
    assert profile.sum() <= wall
    assert profile.sum() > 0.5 * wall
    executor.run()
    assert executor.stop_profile().size == 0


@pytest.mark.parametrize(("system", "number"), [("linux", 1), ("darwin", 6)])
def test_the_clock_has_the_number_that_the_system_gives_it(
    monkeypatch: pytest.MonkeyPatch, system: str, number: int
) -> None:
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", number)
    monkeypatch.setattr(sys, "platform", system)
    found = threads_module.host_functions()
    assert found["clock"] and found["clock_id"] == number


@pytest.mark.skipif(sys.platform == "win32", reason="no such clocks")
def test_kernels_read_the_clock_of_that_number(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number: here that of the time of day, which no monotonic clock is near."""
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", time.CLOCK_REALTIME)
    executor = make(["work"], 1, work=lambda instruction, tid: 0)
    executor.start_profile()
    before = time.time_ns()
    executor.run()
    assert before <= executor.get(abi.CTX_CLOCK) <= time.time_ns()


def test_where_kernels_have_no_clock_nothing_is_profiled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    host = threads_module.host_functions() | {"futex": 0, "clock": 0, "clock_id": 0}
    monkeypatch.setattr(threads_module, "host_functions", lambda: host)
    executor = make(["work"], 2, work=lambda instruction, tid: 0)
    executor.run()
    with pytest.raises(UsageError, match=r"^Kernels can read no clock on this system \(.*\), so .* leave --pr"):
        executor.start_profile()


def test_the_profile_of_a_model(models: Path) -> None:
    with session(write_model(models), ctx=300) as opened:
        opened.executor.start_profile()
        begin = time.perf_counter_ns()
        logits_of(opened, tokens(200))
        wall = time.perf_counter_ns() - begin
        profile = opened.executor.stop_profile()
        idle = np.array([instruction.kernel == "attention_merge" or instruction.kernel.startswith("sample_")
                         for instruction in opened.program.instructions])
        assert (profile[~idle] > 0).all() and not profile[idle].any()
        assert profile.sum() < wall
