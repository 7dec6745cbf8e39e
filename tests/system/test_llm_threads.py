"""One model, several threads: requests run together, and each can be cancelled and closed from outside."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.engine import Stream
from edgeinfer.errors import CancelledError, ClosedError, RequestError
from edgeinfer.llm.api import LLM
from edgeinfer.text import ChatTemplate
from edgeinfer.text.sandbox import BoundedEnvironment
from tests.helpers.sessions import free_blocks
from tests.helpers.slow_model import CTX, write_slow_bundle
from tests.helpers.tasks import Hold, held, within

PROMPTS = ["Once upon a time", "The fox and the crow", "There was a king", "A little bird"]
LONG = 16384
GREEDY = {"temperature": 0.0, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_tokens": LONG - 64}
"""Of a text that takes many seconds, and is cancelled."""
LIMIT_S = 2.0
"""Cancelling takes 100 ms; the rest is for a machine that is busy with something else."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slow_bundle(tmp_path_factory.mktemp("slow") / "bundle")


@pytest.fixture(scope="module")
def slow(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, ctx=CTX) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared(bundle: Path) -> Iterator[LLM]:
    """A model for two sequences."""
    with LLM(bundle, ctx=LONG, max_sequences=2, threads=1) as llm:
        yield llm


def end_of(stream: Stream) -> str | None:
    """Why a stream has ended; None if it has not."""
    try:
        return stream.completion.finish_reason
    except RequestError:
        return None


def all_free(llm: LLM) -> bool:
    return free_blocks(llm.session) == llm.plan.kv_blocks


@pytest.mark.parametrize("max_sequences", [1, 4])
def test_threads_get_what_they_would_get_alone(max_sequences: int) -> None:
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 40}
    with LLM("demo", ctx=256, threads=1, max_sequences=max_sequences) as llm:
        alone = [llm.generate(prompt, **options) for prompt in PROMPTS]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda prompt: llm.generate(prompt, **options), PROMPTS * 6))
        streamed: list[str] = [""] * len(PROMPTS)

        def stream(i: int) -> None:
            for piece in llm.stream(PROMPTS[i], **options):
                streamed[i] += piece

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all_free(llm)
    assert together == alone * 6
    assert streamed == alone


def test_streams_of_one_thread_are_open_together(shared: LLM) -> None:
    """A stream that is not read keeps neither another thread nor its own from the model, and goes on by itself."""
    prompts = [[7, 8, 9], [4, 5]]
    alone = [shared.generate(prompt, max_tokens=40, **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(1) as pool:
        unread = shared.stream([3], **ENDLESS)
        next(unread)
        assert shared.generate(prompts[0], max_tokens=40, **GREEDY) == alone[0]
        assert pool.submit(shared.generate, prompts[1], max_tokens=40, **GREEDY).result() == alone[1]
        assert end_of(unread) is None
        unread.close()
        streams = [shared.stream(prompt, max_tokens=40, **GREEDY) for prompt in prompts]
        texts = [next(stream) for stream in streams]
        assert within(60, lambda: [end_of(stream) for stream in streams] == ["length", "length"])
        assert [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)] == alone
    assert all_free(shared)


def test_cancel_of_one_stream_leaves_the_others_alone(shared: LLM) -> None:
    alone = shared.generate([7, 8, 9], max_tokens=40, **GREEDY)
    with ThreadPoolExecutor(1) as pool:
        first, second = shared.stream([7, 8, 9], max_tokens=40, **GREEDY), shared.stream([4, 5], **ENDLESS)
        text, begun = next(first), next(second)
        reading = pool.submit("".join, second)
        shared.cancel(second)  # runs, and another thread reads it
        assert begun + reading.result() == second.completion.text and second.completion.finish_reason == "cancelled"
        assert text + "".join(first) == alone and first.completion.finish_reason == "length"

        first, second, third = (shared.stream([4, 5], **ENDLESS) for _ in range(3))
        next(first), next(second)
        waiting = pool.submit("".join, third)
        assert within(60, lambda: shared._engine.n_waiting == 1)
        shared.cancel(third)  # waits for one of the sequences
        assert waiting.result() == "" and third.completion.finish_reason == "cancelled"

        last = shared.stream([7, 8, 9], max_tokens=40, **GREEDY)
        waiting = pool.submit("".join, last)
        shared.cancel(first)  # nobody reads it: its sequence is given to the one that waits
        assert waiting.result() == alone and first.completion.finish_reason == "cancelled"
        assert end_of(second) is None
        shared.cancel(first)
        first.cancel()
        never = shared.stream([7, 8, 9])
        shared.cancel(never)
        assert list(never) == [] and never.completion.finish_reason == "cancelled"
        second.close()
        assert all_free(shared)
        with LLM("demo", ctx=256, threads=1) as other:
            for wrong in ("x", other.stream("Once")):
                with pytest.raises(RequestError, match=r"is not a stream of this model; pass the result of stream\(\)"):
                    shared.cancel(wrong)  # type: ignore[arg-type]


def test_cancel_without_a_stream_ends_all_that_run(shared: LLM) -> None:
    """One that waits goes on."""
    with ThreadPoolExecutor(1) as pool:
        streams = [shared.stream([4, 5], **ENDLESS) for _ in range(2)]
        for stream in streams:
            next(stream)
        waiting = pool.submit(shared.complete, [7, 8, 9], max_tokens=4, **GREEDY)
        assert within(60, lambda: shared._engine.n_waiting == 1)
        shared.cancel()
        assert waiting.result().finish_reason == "length"
        assert within(60, lambda: [end_of(stream) for stream in streams] == ["cancelled", "cancelled"])
    assert all_free(shared)


def test_a_cancelled_stream_ends_also_if_nobody_reads_on(shared: LLM) -> None:
    """Within the forward pass that it is in, and with what it had; also where another thread waits for its text."""
    stream, prompt = shared.stream([7, 8, 9], **ENDLESS), shared.stream([7] * (LONG - 100), **ENDLESS)
    text = next(stream)
    stream.cancel()
    assert within(60, lambda: end_of(stream) == "cancelled")
    assert stream.completion.text.startswith(text) and text + "".join(stream) == stream.completion.text
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit("".join, prompt)
        assert within(60, lambda: shared._engine.n_running == 1)
        prompt.cancel()
        assert reading.result() == "" and prompt.completion.finish_reason == "cancelled"
    assert shared.complete([7, 8], max_tokens=2, **GREEDY).finish_reason == "length"
    assert all_free(shared)


def test_cancelling_a_request_that_waits_waits_for_nobody(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of others may take long."""
    entered, go_on = threading.Event(), threading.Event()
    forward = shared.session._run

    def held(*how: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return forward(*how)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(shared.session, "_run", held)
        running = pool.submit(shared.complete, [7, 8, 9], max_tokens=4, n=2, **GREEDY)
        assert entered.wait(60)
        never, submitted = shared.stream([7, 8, 9]), shared.request([7, 8, 9], {})
        submitted.start()
        shared.cancel(never)
        submitted.cancel()
        assert list(never) == [] and never.completion.finish_reason == "cancelled"
        assert submitted.finish().finish_reason == "cancelled"
        go_on.set()
        assert running.result().finish_reason == "length"


@pytest.mark.timing
def test_cancel_ends_a_running_prefill_and_a_running_answer(slow: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(slow.complete, [7] * (CTX - 100), max_tokens=50, ignore_eos=True)
        time.sleep(0.3)
        began = time.monotonic()
        slow.cancel()
        done = prefill.result()
        assert time.monotonic() - began < LIMIT_S
        assert done.finish_reason == "cancelled" and done.completion_tokens == 0 and done.ttft_ms is None
        answer = pool.submit(slow.complete, [7, 8, 9], max_tokens=CTX, ignore_eos=True)
        time.sleep(0.3)
        slow.cancel()
        done = answer.result()
        assert done.finish_reason == "cancelled" and done.completion_tokens > 0
    slow.cancel()  # nothing runs: nothing happens, and the next request is not touched
    assert slow.complete([7, 8, 9], max_tokens=3, ignore_eos=True).finish_reason == "length"
    assert all_free(slow)


@pytest.mark.parametrize("end", [LLM.cancel, LLM.close])
def test_cancel_ends_the_preparation_of_a_prompt(end: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next step of the template, and after the part of the text that is being tokenised."""
    hi, asked = [{"role": "user", "content": "x"}], []
    with LLM("demo", ctx=1024, threads=1) as llm:
        encode = llm.tokenizer._backend.encode  # type: ignore[attr-defined]
        llm.chat_template = ChatTemplate({"default": "{% for i in range(9) %}{{ i }}{% endfor %}"}, {})
        monkeypatch.setattr(BoundedEnvironment, "spend", ticking(BoundedEnvironment.spend, asked, lambda: end(llm)))
        with pytest.raises(CancelledError, match="cancelled while its chat template was rendered"):
            llm.chat(hi)
        assert len(asked) == 3, "the rendering went on"

        def end_then_encode(*how: Any) -> list[int]:
            end(llm)
            return encode(*how)

        monkeypatch.setattr(llm.tokenizer._backend, "encode", end_then_encode)
        with pytest.raises(CancelledError, match="cancelled while its prompt was tokenised"):
            llm.generate("Once upon a time " * 2000)


def ticking(spend: Callable[..., None], asked: list[int], end: Callable[[], None]) -> Callable[..., None]:
    """Count steps of a template, and end the request at the third."""

    def step(*how: Any, **more: Any) -> None:
        asked.append(1)
        if len(asked) == 3:
            end()
        spend(*how, **more)

    return step


@pytest.mark.slow
def test_cancel_from_inside_the_loop(slow: LLM) -> None:
    with held(slow, after=9) as hold:
        stream = slow.stream([7, 8, 9], max_tokens=CTX, ignore_eos=True)
        for _piece in stream:
            slow.cancel()
            hold.go_on.set()
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.completion_tokens < CTX // 10, "tokens went on for seconds"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals to oneself are POSIX")
def test_ctrl_c_in_a_users_program_leaves_the_model_usable(slow: LLM) -> None:
    def press(hold: Hold) -> None:
        if hold.entered.wait(120):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for request in (
            lambda: slow.generate([7] * (CTX - 100), max_tokens=5),
            lambda: list(slow.stream([7, 8, 9], max_tokens=CTX, ignore_eos=True)),
        ):
            with held(slow, after=1) as hold:
                presses = threading.Thread(target=lambda one=hold: press(one))
                presses.start()
                with pytest.raises(KeyboardInterrupt):
                    request()
                hold.go_on.set()
                presses.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert within(120, lambda: all_free(slow))
    assert slow.complete([7, 8, 9], max_tokens=3, ignore_eos=True).finish_reason == "length"


@pytest.mark.timing
def test_close_ends_what_runs_and_refuses_what_waits(tmp_path: Path) -> None:
    llm = LLM(write_slow_bundle(tmp_path / "bundle"), ctx=CTX, max_sequences=1)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(llm.complete, [7] * (CTX - 100), max_tokens=50, ignore_eos=True)
        time.sleep(0.3)
        waiting = pool.submit(llm.complete, [7, 8], max_tokens=5, ignore_eos=True)
        time.sleep(0.1)
        began = time.monotonic()
        llm.close()
        assert time.monotonic() - began < LIMIT_S
        assert running.result().finish_reason == "cancelled"
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            waiting.result()


@pytest.mark.slow
def test_closing_ends_the_threads_and_gives_memory_back(tmp_path: Path) -> None:
    from edgeinfer.base.process import peak_rss_bytes

    bundle = write_slow_bundle(tmp_path / "bundle")
    before = threading.active_count()
    for _ in range(5):
        with LLM(bundle, ctx=CTX) as llm:
            llm.complete([7, 8, 9], max_tokens=2, ignore_eos=True)
    assert within(120, lambda: threading.active_count() <= before)  # others, of tests before, may end meanwhile
    peak = peak_rss_bytes()
    for _ in range(20):
        with LLM(bundle, ctx=CTX) as llm:
            llm.complete([7, 8, 9], max_tokens=2, ignore_eos=True)
    if peak is not None:
        assert (peak_rss_bytes() or 0) - peak < llm.plan.region("kv").bytes  # not one pool was left behind


FORKED = """
import os, signal, sys, threading, time
from edgeinfer import EdgeInferError, LLM
with LLM("demo", ctx=256, threads=1, device=sys.argv[1]) as llm:
    stop = threading.Event()
    def requests():
        while not stop.is_set():
            llm.generate("Once upon a time", max_tokens=100, ignore_eos=True)
    thread = threading.Thread(target=requests)
    thread.start()
    time.sleep(0.3)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        try:
            llm.generate("Once", max_tokens=2)
        except EdgeInferError as error:
            llm.close()
            os._exit(0 if "was forked" in str(error) else 3)
        os._exit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    stop.set()
    thread.join()
    sys.exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("device", ["cpu", pytest.param("onnx-cpu", marks=pytest.mark.slow)])
def test_a_forked_process_waits_for_no_thread_that_it_lacks(device: str) -> None:
    """The engine runs another thread's request when the process forks: neither a request nor closing waits for that."""
    if device != "cpu":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    run = subprocess.run([sys.executable, "-c", FORKED, device], timeout=600, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_thousand_late_cancels_end_nothing() -> None:
    """A thread that ends a request when that is over and others run ends none of these."""
    chance, late = random.Random(9), queue.SimpleQueue[Callable[[], None] | None]()

    def cancel_late() -> None:
        while (act := late.get()) is not None:
            time.sleep(chance.choice((0, 1e-4, 3e-4, 1e-3)))
            act()

    texts, reasons = set(), set()
    with LLM("demo", ctx=64, threads=1) as llm:
        thread = threading.Thread(target=cancel_late)
        thread.start()
        try:
            for i in range(1000):
                stream = llm.stream("Once upon a time", max_tokens=3, temperature=0, reuse=True)
                text = next(stream)
                text += "".join(stream)
                texts.add(text)
                reasons.add(stream.completion.finish_reason)
                late.put((stream.cancel, stream.close, partial(llm.cancel, stream))[i % 3])
        finally:
            late.put(None)
            thread.join()
        assert all_free(llm)
    assert len(texts) == 1 and reasons == {"length"}
