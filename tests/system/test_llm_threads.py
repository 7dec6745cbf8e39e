"""One model, several threads: requests wait for each other, and can be cancelled and closed from outside."""

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
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.engine import requests
from edgeinfer.errors import CancelledError, ClosedError, RequestError
from edgeinfer.llm.api import LLM
from edgeinfer.text import ChatTemplate
from edgeinfer.text.sandbox import BoundedEnvironment
from tests.helpers.slow_model import CTX, write_slow_bundle

PROMPTS = ["Once upon a time", "The fox and the crow", "There was a king", "A little bird"]
LIMIT_S = 2.0
"""Cancelling takes 100 ms; the rest is for a machine that is busy with something else."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_slow_bundle(tmp_path_factory.mktemp("slow") / "bundle"), ctx=CTX) as llm:
        yield llm


def within(limit_s: float, condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def test_threads_get_what_they_would_get_alone() -> None:
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 40}
    with LLM("demo", ctx=256, threads=1) as llm:
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
        assert llm.session.kv.pool.n_free == llm.session.kv.pool.n_blocks
    assert together == alone * 6
    assert streamed == alone


def test_cancel_of_one_stream_leaves_the_others_alone() -> None:
    options = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    with LLM("demo", ctx=256, threads=1) as llm, ThreadPoolExecutor(1) as pool:
        alone = [llm.generate(prompt, **options) for prompt in PROMPTS[:2]]
        first, second = (llm.stream(prompt, **options) for prompt in PROMPTS[:2])
        text = next(first)
        waiting = pool.submit("".join, second)
        assert within(60, lambda: second._request._reading)
        llm.cancel(second)  # waits for its turn in another thread
        assert waiting.result() == "" and second.completion.finish_reason == "cancelled"
        assert text + "".join(first) == alone[0] and first.completion.finish_reason == "length"

        first, second = (llm.stream(prompt, **options) for prompt in PROMPTS[:2])
        next(first)
        waiting = pool.submit("".join, second)
        llm.cancel(first)  # nobody reads it: its turn is given back
        assert waiting.result() == alone[1] and first.completion.finish_reason == "cancelled"
        llm.cancel(first)
        first.cancel()
        never = llm.stream(PROMPTS[0], **options)
        llm.cancel(never)
        assert list(never) == [] and never.completion.finish_reason == "cancelled"
        assert llm.session.kv.pool.n_free == llm.session.kv.pool.n_blocks
        with LLM("demo", ctx=256, threads=1) as other:
            for wrong in ("x", other.stream("Once")):
                with pytest.raises(RequestError, match=r"which is not a stream of this model; give what stream\(\)"):
                    llm.cancel(wrong)  # type: ignore[arg-type]


def test_a_cancel_while_a_piece_is_read_ends_the_stream() -> None:
    """Also where it comes behind the last look of the reader, who may never read again."""
    with LLM("demo", ctx=256, threads=1) as llm:
        stream = llm.stream(PROMPTS[0], max_tokens=40)
        request, plain = stream._request, stream._request._next
        request._next = lambda: (plain(), request.cancel())[0]  # type: ignore[method-assign]
        next(stream)
        assert request.ended and stream.completion.finish_reason == "cancelled"
        assert llm.generate(PROMPTS[1], max_tokens=2)


def test_cancelling_a_waiting_request_waits_for_no_other() -> None:
    with LLM("demo", ctx=256, threads=1) as llm, ThreadPoolExecutor(1) as pool:
        never = llm.stream(PROMPTS[0])
        with llm._queue.step:  # as a long prompt of another request holds it
            assert pool.submit(llm.cancel, never).result(timeout=60) is None
        assert list(never) == [] and never.completion.finish_reason == "cancelled"


def test_an_unread_stream_blocks_others_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "UNREAD_SECONDS", 0.01)
    with LLM("demo", ctx=256, threads=1) as llm, ThreadPoolExecutor(1) as pool:
        stream = llm.stream(PROMPTS[0], max_tokens=40, ignore_eos=True)
        next(stream)
        with pytest.raises(RequestError, match=r"has not been read for 0 s; read it to its end or close it \(stream"):
            pool.submit(llm.generate, PROMPTS[1], max_tokens=4).result()
        stream.close()
        assert pool.submit(llm.complete, PROMPTS[1], max_tokens=4, ignore_eos=True).result().completion_tokens == 4
        assert llm.session.kv.pool.n_free == llm.session.kv.pool.n_blocks


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
    assert slow.session.kv.pool.n_free == slow.session.kv.pool.n_blocks


@pytest.mark.parametrize("end", [LLM.cancel, LLM.close])
def test_cancel_ends_the_preparation_of_a_prompt(end: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next step of the template, and behind the part of the text that is being tokenised."""
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
    stream = slow.stream([7, 8, 9], max_tokens=CTX, ignore_eos=True)
    for n, _piece in enumerate(stream):
        if n == 3:
            slow.cancel()
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.completion_tokens < CTX // 10, "tokens went on for seconds"


@pytest.mark.skipif(sys.platform == "win32", reason="signals to oneself are POSIX")
def test_ctrl_c_in_a_users_program_leaves_the_model_usable(slow: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for request in (
            lambda: slow.generate([7] * (CTX - 100), max_tokens=5),
            lambda: list(slow.stream([7, 8, 9], max_tokens=CTX, ignore_eos=True)),
        ):
            timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                request()
            timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert slow.session.kv.pool.n_free == slow.session.kv.pool.n_blocks
    assert slow.complete([7, 8, 9], max_tokens=3, ignore_eos=True).finish_reason == "length"


@pytest.mark.timing
def test_close_ends_what_runs_and_refuses_what_waits(tmp_path: Path) -> None:
    llm = LLM(write_slow_bundle(tmp_path / "bundle"), ctx=CTX)
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
    assert within(LIMIT_S, lambda: threading.active_count() == before)
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
        signal.alarm(10)
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
@pytest.mark.parametrize("device", ["cpu", "onnx-cpu"])
def test_a_forked_process_waits_for_no_thread_that_it_lacks(device: str) -> None:
    """Another thread has its turn when the process forks: neither a request nor closing waits for that."""
    if device != "cpu":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    run = subprocess.run([sys.executable, "-c", FORKED, device], timeout=600, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_thousand_late_cancels_end_nothing() -> None:
    """A thread that looked up the running request and acts on it when others run cancels only that request."""
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
                running = llm._queue._active
                assert running is not None
                text += "".join(stream)
                texts.add(text)
                reasons.add(stream.completion.finish_reason)
                late.put((running.generation.cancel, stream.close, running.end)[i % 3])
        finally:
            late.put(None)
            thread.join()
        assert llm.session.kv.pool.n_free >= llm.session.kv.pool.n_blocks - 1  # one is kept for the next request
    assert len(texts) == 1 and reasons == {"length"}
