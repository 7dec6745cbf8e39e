"""Generation needs the face of a runner and nothing else; a cancellation reaches its own request and no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.engine import Completion, Engine, Generation, Request, Stream, run_alone
from edgeinfer.engine.scheduler import Scheduler
from edgeinfer.errors import BundleError, CancelledError, ClosedError, QueueFullError, RequestError
from edgeinfer.llm.api import LLM
from edgeinfer.runner import DECODE, PROMPT, Cancellation, Runner, Segment, Sequence

VOCAB = 50


class Fake(Runner):
    """A model in NumPy whose next token is the sum of all tokens so far, modulo the vocabulary."""

    def __init__(self, ctx: int = 40, **options: int):
        self.model = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=ctx)  # type: ignore[assignment]
        self.config = RuntimeConfig(ctx=ctx, **{"prefill_chunk": 4, "max_sequences": 2, "outputs": 2, **options})
        self.plan = SimpleNamespace(  # type: ignore[assignment]
            kv_blocks=100, windowed=None, request=SimpleNamespace(tokens=4))
        self.passes: list[list[tuple[int, tuple[int, ...], int]]] = []
        self.alive = 0
        self.closed = False
        self.open = threading.Event()
        """Passes wait for it."""
        self.open.set()

    def forward(self, segments: list[Segment], cancel: Cancellation | None = None) -> np.ndarray:
        if cancel is not None and cancel.asked:
            raise CancelledError("cancelled")
        assert self.open.wait(60)
        self.passes.append([(len(s.ids), tuple(s.outputs), s.role) for s in segments])
        rows = []
        for segment in segments:
            sums = sum(segment.sequence.tokens) + np.cumsum(segment.ids)
            rows += [10.0 * np.eye(VOCAB, dtype=np.float32)[sums[i] % VOCAB] for i in segment.outputs]
            segment.sequence.tokens.extend(segment.ids)
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def new_sequence(self) -> Sequence:
        self.alive += 1
        return Sequence()

    def fork(self, sequence: Sequence) -> Sequence:
        self.alive += 1
        return Sequence(list(sequence.tokens))

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        del sequence.tokens[n_tokens:]

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self.alive -= 1

    def close(self) -> None:
        self.closed = True


def expected(prompt: list[int], n: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(sum(ids) % VOCAB)
    return tuple(ids[len(prompt) :])


def complete(runner: Fake, prompt: list[int], **options: object) -> Completion:
    config = GenerationConfig(**{"temperature": 0, "ignore_eos": True, **options})
    return run_alone(Generation(runner, None, prompt, config), runner)


def test_generation_is_driven_by_a_runner_alone() -> None:
    """A prompt of several chunks, two samples, greedy; the roles say which tokens are read and which written."""
    runner, prompt = Fake(), [7, 1, 9, 2, 30, 4]
    done = complete(runner, prompt, max_tokens=6, n=2)
    assert [choice.token_ids for choice in done.choices] == [expected(prompt, 6)] * 2
    assert done.finish_reason == "length" and runner.alive == 0
    assert runner.passes[:3] == [[(4, (), PROMPT)], [(2, (1,), PROMPT)], [(1, (0,), DECODE)] * 2]
    assert len(runner.passes) == 2 + 5
    assert complete(Fake(ctx=8), prompt, max_tokens=6).token_ids == expected(prompt, 2)
    assert complete(Fake(), prompt, max_tokens=0).finish_reason == "length"


def test_an_engine_mixes_requests_in_the_passes_of_a_runner() -> None:
    """One token of the text that is written, and as much of the other prompt as the pass has room for."""
    runner, prompts = Fake(), ([7, 1], [9, 2, 30, 4, 8])
    engine, config = Engine(runner), GenerationConfig(temperature=0, ignore_eos=True, max_tokens=6)
    requests = [Request(engine, Generation(runner, None, prompt, config)) for prompt in prompts]
    runner.open.clear()
    requests[0].start()
    while not engine.n_running:
        time.sleep(0.001)
    requests[1].start()
    assert (engine.n_running, engine.n_waiting) == (1, 1)
    runner.open.set()
    assert [request.finish().token_ids for request in requests] == [expected(prompt, 6) for prompt in prompts]
    assert runner.passes[:4] == [[(2, (1,), PROMPT)], [(1, (0,), DECODE), (3, (), PROMPT)],
                                 [(1, (0,), DECODE), (2, (1,), PROMPT)], [(1, (0,), DECODE)] * 2]
    assert engine.passes == len(runner.passes) == 3 + 3 + 2 and runner.alive == 0
    engine.close()
    assert runner.closed


def test_who_enters_finds_room_beside_prompts_that_are_not_read_yet() -> None:
    class Asked(Fake):
        def fits(self, wanted: list[tuple[Sequence, int]]) -> bool:
            self.wanted = [n for _, n in wanted]
            return sum(self.wanted) <= 30

    runner, config = Asked(max_sequences=3), GenerationConfig(temperature=0, ignore_eos=True, max_tokens=6)
    scheduler = Scheduler(runner, 0.2)
    requests = [Request(None, Generation(runner, None, [7] * n, config)) for n in (6, 9, 7)]
    for request in requests:
        scheduler.add(request)
    assert not scheduler.admit()
    assert runner.wanted == [7 + 5, 6 + 5, 9 + 5]  # prompts, and tokens that are run after them
    assert (scheduler.running, scheduler.waiting) == (requests[:2], requests[2:])


def test_a_request_that_waits_is_cancelled_within_the_pass_of_another() -> None:
    """Its client waits neither for that pass, nor for the engine; also where it was never started."""
    runner, config = Fake(max_sequences=1), GenerationConfig(temperature=0, ignore_eos=True, max_tokens=6)
    engine = Engine(runner)
    first, *others = (Request(engine, Generation(runner, None, [7, 1], config)) for _ in range(5))
    runner.open.clear()
    first.start()
    while not engine.n_running:
        time.sleep(0.001)
    for request in others[:3]:
        request.start()
    others[0].cancel()
    others[1].close()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(others[2].next_piece)
        others[2].cancel()
        assert reading.result(60) is None
    others[3].cancel()
    for request in others:
        assert request.ended and request.finish().finish_reason == "cancelled" and not request.finish().token_ids
    runner.open.set()
    assert first.finish().token_ids == expected([7, 1], 6) and len(runner.passes) == 6
    engine.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_request_that_is_refused_has_ended(closed: bool) -> None:
    runner, config = Fake(max_sequences=1), GenerationConfig(temperature=0, ignore_eos=True, max_tokens=2)
    engine = Engine(runner, max_queue=0)
    request = Request(engine, Generation(runner, None, [7, 1], config))
    if closed:
        engine.close()
    with pytest.raises(ClosedError if closed else QueueFullError, match=r"open it again|the maximum"):
        request.next_piece()
    assert request.ended and request.next_piece() is None and request.finish().finish_reason == "cancelled"
    request.close()
    engine.close()


def test_a_runner_that_moves_nothing_keeps_chains_alone() -> None:
    runner = Fake()
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, [7, 1, 9, 2], (), DECODE)])
    runner.accept(sequence, 1, [0, 1])
    assert sequence.tokens == [7, 1, 9]
    with pytest.raises(RequestError, match=r"This model cannot keep the branch \[1\] of a tree; run its tokens as a"):
        runner.accept(sequence, 1, [1])


def test_scores_come_chunk_by_chunk() -> None:
    runner, ids = Fake(outputs=3), [3, 1, 4, 1, 5]
    blocks = list(runner.score(runner.new_sequence(), ids))
    assert [(start, len(rows)) for start, rows in blocks] == [(0, 3), (3, 2)]
    assert np.concatenate([rows for _, rows in blocks]).argmax(axis=1).tolist() == list(np.cumsum(ids) % VOCAB)


def test_a_runner_need_not_keep_prompts_in_files() -> None:
    runner = Fake()
    with pytest.raises(RequestError, match=r"^This model cannot save prompts, so a was not written; leave the prompt"):
        runner.save(runner.new_sequence(), "a")
    with pytest.raises(BundleError, match=r"^This model cannot read the prompt cache a; leave it out\.$"):
        runner.load("a")


# -- cancelling --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=64, threads=1) as opened:
        yield opened


def test_a_cancel_between_two_requests_reaches_neither(llm: LLM) -> None:
    """Of a request that is over: by `LLM.cancel`, and by itself at any later time."""
    old: Stream | None = None
    for _ in range(20):
        stream = llm.stream([5, 6, 7], max_tokens=2, ignore_eos=True)
        for _piece in stream:
            pass
        assert stream.completion.finish_reason == "length"
        llm.cancel()
        if old is not None:
            old.cancel()
        stream.cancel()
        old = stream


@pytest.mark.slow
def test_a_late_cancel_never_ends_the_next_request(llm: LLM) -> None:
    """A thread that always cancels the request before the running one, at any moment of it: 1000 requests finish."""
    previous: list[Request[Completion]] = []
    stop = threading.Event()
    n_cancelled = 0

    def pester() -> None:
        nonlocal n_cancelled
        while not stop.is_set():
            if previous:
                previous[-1].cancel()
                n_cancelled += 1
            time.sleep(0)

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for i in range(100_000):
            request = llm.request([5, 6, 7 + i % 3], {"max_tokens": 2, "ignore_eos": True})
            assert request.finish().finish_reason == "length", f"request {i}"
            previous.append(request)
            if i >= 1000 and n_cancelled > 100:  # the other thread may wait for a core
                break
    finally:
        stop.set()
        thread.join()
    assert n_cancelled > 100
    request = llm.request([5, 6, 7], {"max_tokens": 2, "ignore_eos": True})
    request.cancel()  # one of its own, before it starts, holds
    assert request.finish().finish_reason == "cancelled"
