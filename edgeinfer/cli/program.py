"""The program as a process: its standard streams, the signals that end it, and its end."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from ..errors import DestinationError

SENTENCES = {signal.SIGINT: "Interrupted.", signal.SIGTERM: "Terminated."}
"""Messages for the signals that end the program; its exit code is 128 plus their number, as in shells."""
AGAIN_SECONDS = 0.02


class Terminated(SystemExit):
    """SIGTERM in the middle of a command."""


class StandardOutput(io.TextIOWrapper):
    """Standard output, which says so if it cannot be written; a reader that has left stays `BrokenPipeError`."""

    def write(self, text: str) -> int:
        """Write a text."""
        with _told():
            return super().write(text)

    def flush(self) -> None:
        """Flush written text."""
        with _told():
            super().flush()


class StandardError(io.TextIOWrapper):
    """Standard error; errors of writing to it are ignored, because they could not be reported anywhere."""

    def write(self, text: str) -> int:
        """Write a text, if that is possible."""
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush written text, if that is possible."""
        with contextlib.suppress(OSError):
            super().flush()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DestinationError(f"Standard output cannot be written: {error.strerror or error}.") from None


def open_streams() -> None:
    """Put our streams in the place of Python's, and something in the place of those that were closed.

    Otherwise the next file to be opened would become standard output or error, and receive output meant for it. A
    closed standard output can be read instead of written, so that writing fails; standard input is empty, and text
    written to standard error is lost.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_RDWR)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    # A terminal that cannot show a character must not end the answer.
    sys.stdout = _wrapped(sys.stdout, 1, StandardOutput, "replace")
    sys.stderr = _wrapped(sys.stderr, 2, StandardError, "backslashreplace")


def _wrapped(stream: Any, number: int, kind: type[io.TextIOWrapper], errors: str) -> io.TextIOWrapper:
    if stream is None:
        return kind(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8", errors)
    if not isinstance(stream, io.TextIOWrapper):  # a replacement, as in a test
        return stream
    encoding, lines, through = stream.encoding, stream.line_buffering, stream.write_through
    return kind(stream.detach(), encoding, errors, line_buffering=lines, write_through=through)


def watch_signals() -> None:
    """Let Ctrl-C and SIGTERM end the program with one sentence, wherever it is; those that it ignores stay ignored."""
    for number in SENTENCES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    sys.unraisablehook = _not_lost


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the signals raise where they would end this process at once, so that unfinished files are removed."""
    ours = [number for number in SENTENCES if signal.getsignal(number) is _leave]
    try:
        for number in ours:
            signal.signal(number, _raise)
        yield
    finally:
        for number in ours:
            signal.signal(number, _leave)


def leave(code: int) -> NoReturn:
    """End the process without taking Python apart, which takes longer than a short answer.

    Everything that a command opens it has closed by now; other code has run its handlers for the end.
    """
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing is open yet, or everything is closed again."""
    with contextlib.suppress(OSError):  # a `print` may have been interrupted, so none here
        os.write(2, f"edgeinfer: {SENTENCES[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(128 + number)


def _not_lost(unraisable: Any) -> None:
    """Send a signal once more that fell into a callback that cannot raise, as those of Python's imports."""
    lost = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(unraisable.exc_type)
    if lost is None:
        sys.__unraisablehook__(unraisable)
        return
    import threading

    def again() -> None:
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, lost)
        else:
            signal.raise_signal(lost)

    timer = threading.Timer(AGAIN_SECONDS, again)  # the callback is still running, and this one cannot raise either
    timer.daemon = True
    timer.start()
