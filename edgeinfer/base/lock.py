"""One writer per destination: a lock that the system releases when its process ends, also across containers."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DestinationError
from .process import say

if TYPE_CHECKING:
    from filelock import BaseFileLock

TICK_SECONDS = 0.5
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


class DestinationLock:
    """The exclusive right to write one destination; `acquire` it, and `release` it whatever happens.

    The lock is on a hidden file beside the destination. Its contents and its origin do not matter: a
    process that was killed holds nothing any more. A file system without locks is named once on standard error and
    gives none: writers use names of their own and rename, so that two at once do the work twice and neither is mixed
    with the other.

    Parameters
    ----------
    destination : Path
        File or directory that is going to be written.
    """

    def __init__(self, destination: Path):
        self._destination = destination
        self.path = destination.with_name(f".{destination.name}.lock")
        self._lock: BaseFileLock | None = None

    @property
    def held(self) -> bool:
        """True if it is ours."""
        return self._lock is not None

    def acquire(self, waiting: Callable[[], object] | None = None) -> bool:
        """Take the lock; return whether the file system has locks.

        Parameters
        ----------
        waiting : callable, optional
            Called twice a second while another process holds it, for as long as that takes; it may raise.

        Raises
        ------
        DestinationError
            Without `waiting`: if another process writes this destination.
        OSError
            If the lock file cannot be made.
        """
        import filelock

        lock = filelock.FileLock(self.path, thread_local=False)
        while True:
            try:
                with warnings.catch_warnings():  # it would fall back to a lock by process ids
                    warnings.simplefilter("ignore")
                    lock.acquire(timeout=0)
                break
            except filelock.Timeout:
                self._refuse_no_place()
                if waiting is None:
                    raise DestinationError(f"{self._destination} is being written by another process; wait until it "
                                           "has finished.") from None
                waiting()
                time.sleep(TICK_SECONDS)
            except (OSError, NotImplementedError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                    raise
                return self._without(lock)
        if type(lock).__name__ == "SoftFileLock":  # the kind that it has chosen itself
            return self._without(lock)
        self._lock = lock
        return True

    def release(self) -> None:
        """Give the lock back and remove its file, if it is ours."""
        if self._lock is not None:
            # While it is held, so that no other lock is removed; a waiting process finds the file gone and makes one.
            # Older versions of the library remove it themselves, and Windows does not let an open file be removed.
            if _keeps_files():
                with suppress(OSError):
                    self.path.unlink()
            self._lock.release()
            self._lock = None

    def _refuse_no_place(self) -> None:
        """Raise an OSError where the lock's file cannot be made, which the library takes for a lock of others."""
        if not os.path.lexists(self.path):  # or its owner has just removed it
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644))

    def _without(self, lock: BaseFileLock) -> bool:
        lock.release()
        say(f"The file system of {self.path.parent} has no locks: other processes are not waited for, and may do the "
            "same work at the same time.")
        return False


def _keeps_files() -> bool:
    from filelock import __version__

    return int(__version__.split(".")[0]) >= 4
