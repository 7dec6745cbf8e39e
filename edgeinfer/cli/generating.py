"""A request while it runs on a terminal: Ctrl-C ends it, and the reading of a long prompt is shown."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .progress import ProgressLine

if TYPE_CHECKING:
    from ..llm import LLM

LONG_PROMPT = 1_000_000_000
"""Tokens times bytes of weights from which on a prompt may take seconds, on the slowest boards."""


@contextmanager
def cancelling(end: Callable[[], object]) -> Iterator[threading.Event]:
    """Let Ctrl-C call `end`, which ends the running request; the event says whether it did.

    A second Ctrl-C ends the program.
    """
    cancelled = threading.Event()
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as after nohup: it stays so
    if deaf or threading.current_thread() is not threading.main_thread():  # only that one receives signals
        yield cancelled
        return

    def cancel(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancelled.set()
        end()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, before)


def reading(llm: LLM, ids: list[int], progress: ProgressLine) -> ProgressLine | None:
    """Return the callback for progress of the prompt; None if nothing reads it, so as not to delay the answer."""
    return progress if len(ids) * llm.runner.bundle.weights_bytes >= LONG_PROMPT else None
