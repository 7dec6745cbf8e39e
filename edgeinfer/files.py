"""Opening files that a user or a bundle names: plain files only, for reading a fifo may wait for ever."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_plain(path: str | Path) -> io.BufferedReader:
    """Open a plain file for reading bytes; links are followed.

    Raises
    ------
    OSError
        It cannot be opened, or is a directory, fifo, socket or device; `strerror` says which.
    """
    refuse_special(path, os.stat(path))  # before opening, which makes some devices do things
    handle = os.open(path, _FLAGS)  # and without waiting, should it have become a fifo meanwhile
    try:
        refuse_special(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return open(handle, "rb")


def refuse_special(path: str | Path, status: os.stat_result) -> None:
    """Raise an OSError for what is no plain file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))
