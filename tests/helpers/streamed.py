"""Runs whose storage misbehaves: readers that call a function in place of pread, and a watchdog."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import BundleError, CancelledError
from edgeinfer.runner import Cancellation, Segment, Sequence
from edgeinfer.runtime import Session

WATCHDOG_SECONDS = 60
"""A hang ends here; no test waits so long otherwise."""
Pread = Callable[[int, int, int, int], int]
"""pread with an address in place of a buffer: file, address, bytes, offset; returns the bytes, or -1."""


def watched(work: Callable[[], Any]) -> Any:
    """Return or raise the outcome of `work`; fail if it hangs."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WATCHDOG_SECONDS)
    assert outcome, "it hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def cancelled_twice(opened: Session, sequence: Sequence, ids: list[int]) -> None:
    """Go on with tokens while reads do not return; a cancellation from another thread ends it, again and again."""
    for _ in range(2):
        cancel = Cancellation()
        timer = threading.Timer(0.1, cancel.cancel)
        timer.start()
        with pytest.raises(CancelledError):
            for token in ids:
                watched(lambda token=token, c=cancel: opened.forward([Segment(sequence, [token], [0])], c))
        timer.join()


def resumed_after_cancellations(opened: Session, sequence: Sequence, ids: list[int], n: int,
                                answers: threading.Event) -> np.ndarray:
    """Logits of the tokens after the first n, decoded while reads do not return (`answers`), and then again."""
    opened.prefill(sequence, ids[:n])
    answers.clear()
    cancelled_twice(opened, sequence, ids[n:])
    answers.set()
    opened.truncate(sequence, n)
    return np.stack([watched(lambda token=token: opened.decode([sequence], [token])[0].copy()) for token in ids[n:]])


def decoded_after_errors(opened: Session, prompt: list[int], ids: list[int], bad: list[bool], match: str) -> np.ndarray:
    """Logits of tokens after a prompt; before that all reads fail twice (while `bad` holds something)."""
    sequence = opened.new_sequence()
    opened.prefill(sequence, prompt)
    bad.append(True)
    for _ in range(2):
        with pytest.raises(BundleError, match=match):
            for token in ids:
                watched(lambda token=token: opened.decode([sequence], [token]))
    bad.clear()
    opened.truncate(sequence, len(prompt))
    return np.stack([watched(lambda token=token: opened.decode([sequence], [token])[0].copy()) for token in ids])


def real(file: int, to: int, length: int, offset: int) -> int:
    buffer = (ctypes.c_uint8 * length).from_address(to)
    try:
        return os.preadv(file, [buffer], offset)
    except OSError:
        return -1
