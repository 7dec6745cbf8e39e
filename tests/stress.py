"""Tests that run in a process of their own, because they would fail by hanging or crashing.

``python -m tests.stress MODE BUNDLE``
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import CancelledError
from edgeinfer.kernels import Kernels, abi, choose
from edgeinfer.runner import Cancellation, Sequence
from edgeinfer.runtime import Instruction, Program, Session
from edgeinfer.runtime.execution.executor import Executor
from tests.helpers.python_kernels import AnyMode
from tests.helpers.sessions import free_blocks, logits_of, session, tokens
from tests.stress_forks import fork, fork_holding, fork_importing

SECONDS = 5.0
"""Of the modes that go on for long on a busy machine."""
N_CHUNKS, CHUNK_BYTES, N_INSTRUCTIONS = 11, 256, 3


@functools.cache
def kernels() -> Kernels:
    """This machine's, linked once."""
    return Kernels(choose())


class Sums:
    """An executor whose instructions add up the same numbers in chunks that threads claim: each chunk must count
    once.
    """

    def __init__(self, threads: int):
        self.data = aligned(N_CHUNKS * CHUNK_BYTES)
        self.data[:] = np.random.default_rng(0).integers(0, 256, self.data.size)
        self.out = aligned(N_INSTRUCTIONS * threads * 64)
        instructions = tuple(
            Instruction("stream_read", "sum", (("weights", 0), ("scratch", i * threads * 64)), (CHUNK_BYTES, N_CHUNKS))
            for i in range(N_INSTRUCTIONS)
        )
        self.executor = Executor(Program(instructions), kernels(), threads, {"weights": self.data, "scratch": self.out})

    def run(self, cancel: Cancellation | None = None) -> None:
        self.out[:] = 0
        self.executor.run(cancel=cancel)
        sums = self.out.view(np.int32).reshape(N_INSTRUCTIONS, -1, 16)[:, :, 0].sum(axis=1, dtype=np.int32)
        expected = self.data.view(np.int32).sum(dtype=np.int32)
        assert (sums == expected).all(), f"{sums} instead of {expected}"


def aligned(nbytes: int) -> np.ndarray:
    """Bytes at an address that is a multiple of 64."""
    whole = np.zeros(nbytes + 64, np.uint8)
    return whole[-whole.ctypes.data % 64 :][:nbytes]


def passes(bundle: Path) -> None:
    """Thousands of short forward passes, back to back and after pauses, by fewer and more threads than cores."""
    rng = np.random.default_rng(0)
    for threads, n in ((1, 3000), (2, 2000), (3, 1000), (7, 500)):
        sums, end = Sums(threads), time.perf_counter() + SECONDS / 3
        for i in range(n):
            sums.run()
            if i % 10 == 0:
                time.sleep(rng.uniform(0, 4e-4))  # some threads spin still, some sleep already
            if time.perf_counter() > end:
                break
        sums.executor.close()


def modes(bundle: Path) -> None:
    """Forward passes by one thread and by all, with the caller and with the helper, in any order; some are cancelled.

    On more threads than cores, while other threads take the cores away: whoever is slow to leave the last barrier of a
    forward pass must not take part in the next one.
    """
    stop, hogs = threading.Event(), kernels().function("spin")
    idle = aligned(abi.CTX_BYTES)
    rng = np.random.default_rng(2)

    def hog() -> None:
        while not stop.is_set():
            hogs(20_000, idle.ctypes.data, 0, 1)
            time.sleep(1e-4)

    busy = [threading.Thread(target=hog) for _ in range(2)]
    for thread in busy:
        thread.start()
    for threads in (2, 3, 5, 8):
        sums, end, cancelled, done = Sums(threads), time.perf_counter() + SECONDS / 6, 0, 0
        sums.executor.tuner = AnyMode(threads)  # type: ignore[assignment]
        while time.perf_counter() < end:
            cancellation = Cancellation()
            timer = threading.Timer(rng.uniform(0, 3e-4), cancellation.cancel)
            if done % 4 == 0:
                timer.start()
            try:
                sums.run(cancellation)
            except CancelledError:
                cancelled += 1
            done += 1
            timer.cancel()
        sums.executor.close()
        print(f"{threads} threads: {done} forward passes, {cancelled} cancelled")
    stop.set()
    for thread in busy:
        thread.join()


def open_close(bundle: Path) -> None:
    """Executors and sessions opened, used and closed, at once or after a pause."""
    before = threading.active_count()
    for i in range(100):
        sums = Sums(7)
        for _ in range(i % 21):
            sums.run()
        if i % 5 == 0:
            time.sleep(1e-3)
        sums.executor.close()
    ids, expected = tokens(20), None
    for i in range(30):
        with session(bundle, threads=1 + i % 7, prefill_chunk=6) as opened:
            logits = logits_of(opened, ids, n_decoded=i % 3).tobytes()[-4 * opened.model.vocab_size :]
        expected = expected or logits
        assert logits == expected
    assert threading.active_count() == before


def drop(bundle: Path) -> None:
    """Sessions that are forgotten while their threads still spin: the threads end, their memory stays until then."""
    before = threading.active_count()
    for i in range(60):
        opened: Any = _open(bundle, threads=1 + i % 4)
        logits_of(opened, tokens(5))
        opened = None
        assert threading.active_count() == before


def leave(bundle: Path) -> None:
    """Python exits right after a forward pass, nothing closed."""
    opened = _open(bundle, threads=3)
    logits_of(opened, tokens(5))
    sys.modules["kept"] = opened  # type: ignore[assignment]  # until modules are torn down


class Interruption(BaseException):
    """Raised by a signal handler, as KeyboardInterrupt is."""


def interrupts(bundle: Path) -> None:
    """Signals at any moment of a prefill and a few decode steps; every third time two of them, 30 us apart."""
    signals, end = 0, time.perf_counter() + SECONDS

    def interrupt(number: int, frame: object) -> None:
        nonlocal signals
        if signals:  # one may arrive late, by way of another thread
            signals -= 1
            if signals:
                signal.setitimer(signal.ITIMER_REAL, 3e-5)
            raise Interruption

    def attempt(opened: Session, sequence: Sequence, delay: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, delay)
        opened.prefill(sequence, ids[:prompt])
        for token in ids[prompt:-1]:
            opened.decode([sequence], [token])

    signal.signal(signal.SIGALRM, interrupt)
    rng, prompt, ids, hits, times = np.random.default_rng(1), 40, tokens(60), 0, []
    with session(bundle, threads=2, prefill_chunk=7, ctx=80) as opened:
        for _ in range(9):
            begin = time.perf_counter()
            expected = logits_of(opened, ids, n_decoded=20)[-1].tobytes()
            times.append(time.perf_counter() - begin)
        for i in range(600):
            sequence, signals = opened.new_sequence(), 2 if i % 3 == 0 else 1
            begin = time.perf_counter()
            try:
                try:
                    attempt(opened, sequence, rng.uniform(1e-6, min(times)))
                    times.append(time.perf_counter() - begin)  # the machine may have been busy before
                except Interruption:
                    hits += 1
                while signals == 1 and i % 3 == 0:
                    time.sleep(1e-5)
            except Interruption:  # the second one
                pass
            signals = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert sequence.tokens == ids[: len(sequence)]
            assert opened.prefill(sequence, ids[len(sequence) :]).tobytes() == expected, f"after interruption {i}"
            opened.release(sequence)
            if time.perf_counter() > end:
                break
        assert hits > i / 2, hits
        assert opened.plan.kv_blocks - free_blocks(opened) <= 4, "signals lose few blocks, and those come back"
        opened.prefill(opened.new_sequence(), tokens(80))


def ctrl_c(bundle: Path) -> None:
    """SIGINT inside a long prompt raises KeyboardInterrupt within 100 ms, and the session goes on."""
    ids = tokens(1500)
    with session(bundle, threads=2, prefill_chunk=512) as opened:
        expected = logits_of(opened, ids[:30]).tobytes()
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids[:30])
        for delay in (0.02, 0.05, 0.08):
            sent = []

            def press(delay: float = delay, sent: list[float] = sent) -> None:
                time.sleep(delay)
                sent.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=press)
            thread.start()
            try:
                opened.prefill(sequence, ids)
                raise AssertionError("the prompt is too short for this test")
            except KeyboardInterrupt:
                late = time.perf_counter() - sent[0]
            thread.join()
            print(f"{1000 * late:.1f} ms")
            assert late < 0.1
            opened.truncate(sequence, 30)
        assert logits_of(opened, ids[:30]).tobytes() == expected
        try:
            cancellation = Cancellation()
            cancellation.cancel()
            opened.prefill(sequence, [1], cancellation)
        except CancelledError:
            return
        raise AssertionError("a cancellation got lost")


FLOW = {"VmSize": 1024, "VmHWM": 64, "VmRSS": 64, "faults": 16}  # KiB, and page faults; one of Python's arenas is 1 MiB


def flow(bundle: Path) -> None:
    """Check the cost of 64 decoded tokens: the numbers of FLOW at most; the tokens themselves are in a list.

    One token may take 3 KiB of Python's objects at a time, without a copy of the logits.
    """
    import gc
    import tracemalloc

    def decode(opened: Session, sequence: Sequence, n: int) -> None:
        logits = opened.decode([sequence], [1])
        for _ in range(n - 1):
            logits = opened.decode([sequence], [int(logits[0].argmax())])

    for threads, kv in ((1, "int8"), (2, "f16"), (3, "f32")):
        with session(bundle, threads=threads, kv=kv, ctx=1024) as opened:
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(230))
            decode(opened, sequence, 40)  # warm: past the first attention split, several blocks
            gc.collect()
            for attempt in range(3):  # a leak shows each time; now and then the system moves pages of its own accord
                more = _more(functools.partial(decode, opened, sequence, 64))
                if all(more[name] <= most for name, most in FLOW.items()):
                    break
                assert attempt < 2, f"64 tokens took {more}, and {FLOW} is allowed"
            peak = 1024 * _status("VmHWM")
            assert peak <= opened.plan.total_bytes, f"{peak} bytes, planned {opened.plan.total_bytes}"
            tracemalloc.start()
            decode(opened, sequence, 64)  # fills the free lists of Python and NumPy with memory that is counted
            gc.collect()
            decode(opened, sequence, 1)  # collecting emptied the free lists
            before, _ = tracemalloc.get_traced_memory()
            most = 0
            for _ in range(64):
                now, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                decode(opened, sequence, 1)
                most = max(most, tracemalloc.get_traced_memory()[1] - now)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert after - before < 8192, f"{after - before} bytes"  # 64 numbers in the sequence's list of tokens
            assert most < 3072, f"{most} bytes at most"


def _more(work: Callable[[], object]) -> dict[str, int]:
    """Return by how much the numbers of FLOW grow during some work."""
    import resource

    def now() -> dict[str, int]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return {"faults": faults} | {name: _status(name) for name in FLOW if name != "faults"}

    before = now()
    work()
    after = now()
    return {name: after[name] - before[name] for name in FLOW}


def _status(name: str) -> int:
    """A size in KiB from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _open(bundle: Path, **options: Any) -> Session:
    from edgeinfer.bundle import Bundle
    from edgeinfer.config import RuntimeConfig

    return Session(Bundle.open(bundle), RuntimeConfig(**options))


MODES = {f.__name__: f for f in (passes, modes, open_close, drop, leave, fork, fork_importing, fork_holding,
                                   interrupts, ctrl_c, flow)}

if __name__ == "__main__":
    MODES[sys.argv[1]](Path(sys.argv[2]))
