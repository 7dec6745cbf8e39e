"""Flush a file in the background while it is written, so that closing it does not wait long."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

STEP_BYTES = 64 << 20
"""Bytes written between two flushes; a slow disk is flushed less often."""


class WriteBack:
    """Flushes a file from a thread of its own.

    The operating system itself flushes only when a tenth of the memory is dirty, or after seconds. Errors of the disk
    are raised in the thread that writes.
    """

    def __init__(self, file: BinaryIO):
        self._descriptor = file.fileno()
        self._pool = ThreadPoolExecutor(1, "edgeinfer-write")
        self._running: Future[None] | None = None
        self._new = 0

    def wrote(self, nbytes: int) -> None:
        """Count bytes that were written; raises `OSError` if earlier ones did not reach the disk."""
        self._new += nbytes
        if self._new >= STEP_BYTES and (self._running is None or self._running.done()):
            self.wait()
            self._new = 0
            self._running = self._pool.submit(_sync, self._descriptor)

    def wait(self) -> None:
        """Wait until nothing is under way; raises `OSError` if bytes did not reach the disk."""
        running, self._running = self._running, None
        if running:
            running.result()

    def close(self) -> None:
        """End the thread; the file may be closed then."""
        self._pool.shutdown()


_sync = getattr(os, "fdatasync", os.fsync)
