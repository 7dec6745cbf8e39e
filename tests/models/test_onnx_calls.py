"""Calls of onnxruntime are ended while they run, and what comes after them is as if they had never begun."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import OnnxRunner
from edgeinfer.backends.onnx.caller import _Call
from edgeinfer.errors import CancelledError, ClosedError
from edgeinfer.runner import Cancellation, Segment
from tests.helpers.sessions import TINY, running, tokens, write_model

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
WIDE = replace(TINY, vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=12,
               num_attention_heads=8, num_key_value_heads=4, head_dim=64)
CHUNK = 768
"""Tokens of a prompt that goes through in one call, which takes about two seconds."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("wide"), WIDE)


@pytest.fixture
def opened(path: Path) -> Iterator[OnnxRunner]:
    with running(path, "onnx-cpu", ctx=CHUNK + 64, prefill_chunk=CHUNK, max_sequences=2) as runner:
        assert isinstance(runner, OnnxRunner)
        yield runner


class Wish:
    """Does something from another thread once something has happened, and says when."""

    def __init__(self, happened: threading.Event, action: Any):
        self.at = 0.0

        def act() -> None:
            happened.wait()
            self.at = time.perf_counter()
            action()

        self.thread = threading.Thread(target=act, daemon=True)
        self.thread.start()

    def took(self) -> float:
        """Seconds since then."""
        now = time.perf_counter()
        self.thread.join()
        return now - self.at


@contextmanager
def endless_calls() -> Iterator[threading.Event]:
    """Have each call run its model again and again until it is ended: on a fast machine, too, it has not been over.

    The event is set when a call has begun. What nobody ends is over after a minute, and then raises nothing.
    """
    begun, make = threading.Event(), _Call.make

    def make_endless(call: _Call) -> None:
        run, until = call._run, time.monotonic() + 60

        def again(*given: Any) -> None:
            begun.set()
            while time.monotonic() < until:
                run(*given)

        call._run = again
        make(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Call, "make", make_endless)
        yield begun


PROMPT = tokens(CHUNK, 1, WIDE.vocab_size)
BEFORE = tokens(9, 2, WIDE.vocab_size)


def goes_on(opened: OnnxRunner, sequence: Any) -> np.ndarray:
    """Logits after a few more tokens, of a text that an ended forward pass was to make longer."""
    assert sequence.tokens == BEFORE
    rows = [opened.decode([sequence], [token])[0].copy() for token in (3, 4)]
    rows.append(opened.prefill(sequence, PROMPT[:20]).copy())
    opened.truncate(sequence, len(BEFORE))
    return np.stack(rows)


@pytest.fixture
def started(opened: OnnxRunner) -> tuple[Any, np.ndarray]:
    """A sequence that holds a text, and how it goes on."""
    sequence = opened.new_sequence()
    opened.prefill(sequence, BEFORE)
    return sequence, goes_on(opened, sequence)


def test_a_long_prompt_ends_within_its_call(opened: OnnxRunner, started: tuple[Any, np.ndarray]) -> None:
    sequence, want = started
    for _ in range(3):
        cancel = Cancellation()
        with endless_calls() as begun, pytest.raises(CancelledError, match="The run was cancelled"):
            Wish(begun, cancel.cancel)
            opened.forward([Segment(sequence, PROMPT[9:])], cancel)
        assert np.array_equal(goes_on(opened, sequence), want)


@pytest.mark.timing
def test_a_call_ends_long_before_its_end(opened: OnnxRunner, started: tuple[Any, np.ndarray]) -> None:
    sequence, _ = started
    began = time.perf_counter()
    opened.prefill(sequence, PROMPT[9:])
    whole = time.perf_counter() - began
    opened.truncate(sequence, len(BEFORE))
    cancel = Cancellation()
    with endless_calls() as begun, pytest.raises(CancelledError):
        wish = Wish(begun, cancel.cancel)
        opened.forward([Segment(sequence, PROMPT[9:])], cancel)
    assert wish.took() < whole / 4


@pytest.mark.slow
def test_the_wish_to_end_one_pass_does_not_reach_the_next(opened: OnnxRunner, started: tuple[Any, np.ndarray]) -> None:
    """Asked at any moment about the end of a forward pass: either that one ended, or nothing did."""
    sequence, want = started
    began = time.perf_counter()
    opened.prefill(sequence, PROMPT[:40])
    opened.truncate(sequence, len(BEFORE))
    whole, ended = time.perf_counter() - began, 0
    for i in range(12):
        cancel = Cancellation()
        wish = threading.Timer(whole * (0.4 + i / 12), cancel.cancel)
        wish.start()
        try:
            opened.forward([Segment(sequence, PROMPT[:40])], cancel)
        except CancelledError:
            ended += 1
        else:
            assert len(sequence) == len(BEFORE) + 40
            opened.truncate(sequence, len(BEFORE))
        assert np.array_equal(goes_on(opened, sequence), want)
        wish.join()


def test_closing_ends_the_call_of_another_thread(opened: OnnxRunner) -> None:
    with endless_calls() as begun, pytest.raises(ClosedError, match="The model was closed"):
        wish = Wish(begun, opened.close)
        opened.prefill(opened.new_sequence(), PROMPT)
    wish.thread.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "onnxruntime calls" and thread.is_alive()]


needs_signals = pytest.mark.skipif(
    sys.platform == "win32" or threading.current_thread() is not threading.main_thread(),
    reason="a process sends itself a signal that its main thread takes")


@needs_signals
@pytest.mark.parametrize("raises", [False, True], ids=["a handler that cancels", "a handler that raises"])
def test_a_signal_handler_reaches_a_pass_of_the_main_thread(raises: bool, opened: OnnxRunner,
                                                            started: tuple[Any, np.ndarray]) -> None:
    """As Ctrl-C does, twice: the second comes while the first ends the call."""
    sequence, want = started
    cancel, running = Cancellation(), [True]

    def handle(*_: object) -> None:
        cancel.cancel()
        if raises and running:  # the forward pass may have ended before the second one
            raise KeyboardInterrupt

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.002)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with endless_calls() as begun, pytest.raises(KeyboardInterrupt if raises else CancelledError):
            wish = Wish(begun, twice)
            try:
                opened.forward([Segment(sequence, PROMPT[9:])], cancel)
            finally:
                running.clear()
        wish.thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert np.array_equal(goes_on(opened, sequence), want)


def test_a_handler_that_closes_the_model_ends_the_pass(opened: OnnxRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls of a forward pass, in the very thread that runs."""
    run = opened.sessions._caller.run

    def closing(*given: Any) -> None:
        opened.close()
        run(*given)

    monkeypatch.setattr(opened.sessions._caller, "run", closing)
    with pytest.raises(ClosedError, match="The model was closed"):
        opened.prefill(opened.new_sequence(), BEFORE)


@pytest.mark.parametrize("n", [9, 1])
def test_a_handler_that_closes_the_model_behind_a_call(n: int, opened: OnnxRunner,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its logits are read: those of several tokens have gone, those of a step are there or have gone."""
    run = opened.sessions._caller.run

    def closing(*given: Any) -> None:
        run(*given)
        opened.close()

    monkeypatch.setattr(opened.sessions._caller, "run", closing)
    try:
        assert opened.prefill(opened.new_sequence(), BEFORE[:n]).shape == (WIDE.vocab_size,)
        assert n == 1
    except ClosedError as error:
        assert "The model was closed" in str(error)


def test_the_thread_ends_with_a_runner_that_was_not_closed(path: Path) -> None:
    with running(path, "onnx-cpu", ctx=64) as runner:
        assert isinstance(runner, OnnxRunner)
        runner.prefill(runner.new_sequence(), BEFORE)
        caller, thread = runner.sessions._caller, runner.sessions._caller._thread
        del runner.sessions._caller
        assert thread and thread.is_alive()
        del caller
        thread.join(600)
        assert not thread.is_alive()
        runner.sessions._caller = type("Nobody", (), {"end": lambda self: None, "close": lambda self: None})()
