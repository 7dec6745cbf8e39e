"""Faults inside the tokenizer libraries: one sentence instead of a panic, and nothing of theirs on standard error."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import EdgeInferError, TokenizerError
from .files import REMEDY

_REDIRECTING = threading.Lock()
FORK_SECONDS = 10.0
"""Longest time that a fork waits for another thread to give standard error back."""


def _before_fork() -> None:
    """Wait for a thread that holds standard error back; in the child of a fork no thread would release it."""
    _forking.append(_REDIRECTING.acquire(timeout=FORK_SECONDS))


def _after_fork_in_parent() -> None:
    if _forking.pop():
        _REDIRECTING.release()


def _after_fork_in_child() -> None:
    global _REDIRECTING
    _REDIRECTING = threading.Lock()
    _forking.clear()


_forking: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Turn any exception of a library (a Rust panic is a BaseException) into a `TokenizerError` that names the file."""
    try:
        yield
    except (EdgeInferError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TokenizerError(f"{path} is not a usable tokenizer ({reason.rstrip('.')}); {REMEDY}.") from error


@contextmanager
def held_back_stderr() -> Iterator[None]:
    """Keep standard error from the system's descriptor 2, and pass it on afterwards unless a `TokenizerError` came.

    Rust tells of a panic there, and SentencePiece of its errors, before Python hears of them; the sentence of the error
    says it all. To be used while a tokenizer is opened, not while texts are encoded: it holds for the whole process.
    """
    with _REDIRECTING, _scratch_file() as scratch:
        try:
            stderr = os.dup(2)
        except OSError:  # closed: there is no reader
            yield
            return
        with suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        os.dup2(scratch, 2)
        wanted = True
        try:
            yield
        except TokenizerError:
            wanted = False
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.lseek(scratch, 0, os.SEEK_SET)
            while wanted and (text := os.read(scratch, 1 << 16)):
                with suppress(OSError):
                    os.write(2, text)


@contextmanager
def _scratch_file() -> Iterator[int]:
    """Return the descriptor of an unnamed file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("edgeinfer")
        try:
            yield handle
        finally:
            os.close(handle)
        return
    from tempfile import TemporaryFile

    with TemporaryFile() as file:
        yield file.fileno()
