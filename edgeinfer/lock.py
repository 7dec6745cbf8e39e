"""One writer per destination: a lock file with the writer's process, so that a dead writer's lock is recognised."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .errors import DestinationError

UNFINISHED_SECONDS = 10.0


class DestinationLock:
    """The exclusive right to write one destination; `acquire` it, and `release` it whatever happens.

    Parameters
    ----------
    destination : Path
        What is going to be written. The lock is a hidden file beside it.
    """

    def __init__(self, destination: Path):
        self._destination = destination
        self.path = destination.with_name(f".{destination.name}.lock")
        self.held = False

    def acquire(self) -> None:
        """Create the lock file, taking over one whose process has ended.

        Raises
        ------
        DestinationError
            If another process that is still alive writes this destination.
        """
        for _ in range(3):  # a stale lock may be taken over by somebody else between two of our steps
            try:
                file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._remove_if_stale()
                continue
            self.held = True
            with os.fdopen(file, "w") as stream:
                stream.write(_identity(os.getpid()))
            return
        raise DestinationError(f"{self._destination} is being written by another process; wait until it has finished.")

    def release(self) -> None:
        """Remove the lock file if it is ours."""
        if self.held:
            self.path.unlink(missing_ok=True)
            self.held = False

    def _remove_if_stale(self) -> None:
        text = _read(self.path)
        if text is None:  # released in the meantime
            return
        if self._alive(text):
            raise DestinationError(
                f"{self._destination} is being written by another process (lock file {self.path}); "
                "wait until it has finished, or delete the lock file if no edgeinfer is running."
            )
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read(aside) == text:
            aside.unlink()
        else:  # between reading and renaming, somebody else took the stale lock over: give theirs back
            os.rename(aside, self.path)

    def _alive(self, text: str) -> bool:
        """Whether the writer of this lock still runs; an unfinished lock file counts as alive for a moment."""
        pid = text.split(" ")[0]
        if pid.isdigit():
            return _identity(int(pid)) == text
        try:
            return time.time() - self.path.stat().st_mtime < UNFINISHED_SECONDS
        except FileNotFoundError:
            return False


def _identity(pid: int) -> str:
    """The process id with its start time, because ids are used again."""
    import psutil

    try:
        return f"{pid} {psutil.Process(pid).create_time():.2f}"
    except (psutil.Error, ValueError, OverflowError):
        return ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
