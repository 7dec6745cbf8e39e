"""The file of weights, open for reads that go past the system's page cache where that is possible."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from edgeinfer.bundle import check_state
from edgeinfer.errors import BundleError
from edgeinfer.memory_planner import PAGE_BYTES

from ...base.dataclass import dataclass
from ...base.files import os_errors, uncached


@dataclass(frozen=True)
class File:
    """An open file of weights."""

    path: Path
    handle: int
    direct: bool
    """True if reads go past the system's page cache."""

    @classmethod
    def open(cls, path: Path, state: os.stat_result) -> File:
        """Open the file that was checked before, for direct I/O where its file system allows it.

        Raises
        ------
        BundleError
            It cannot be read, or is no longer the file whose `state` is given.
        """
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
        with os_errors(BundleError, f"{path} cannot be read"):
            if hasattr(os, "O_DIRECT"):
                try:
                    return cls(path, _tried(os.open(path, flags | os.O_DIRECT)), True)._same(state)
                except OSError:  # refused on opening or on reading; other errors show without it
                    pass
            handle = os.open(path, flags)
            return cls(path, handle, uncached(handle))._same(state)

    def _same(self, state: os.stat_result) -> File:
        try:
            self.check(state)
        except BundleError:
            os.close(self.handle)
            raise
        return self

    def check(self, state: os.stat_result) -> None:
        """Raise `BundleError` if the file was written to since it had this state, or another took its place."""
        check_state(self.path, self.handle, state)


def _tried(handle: int) -> int:
    """Return a handle that has read a page; some file systems take the flag and refuse the reads."""
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(handle, [page], 0)
    except OSError:
        os.close(handle)
        raise
    return handle
