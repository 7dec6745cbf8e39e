"""Opening files that a user or a bundle names, plain ones only (reading a fifo may wait for ever); replacing files."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import EdgeInferError

if sys.platform != "win32":  # where an open file cannot be removed
    import fcntl

PART = ".edgeinfer-part"
"""Suffix of files that are being written; no other program uses it."""
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@contextmanager
def os_errors(kind: type[EdgeInferError], said: str, end: str = ".") -> Iterator[None]:
    """Raise an `OSError` within as an error of edgeinfer: `said`, a colon, the system's reason, and `end`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{said}: {error.strerror or error}{end}") from None


def uncached(handle: int) -> bool:
    """Switch the page cache off for an open file by macOS's own call; return whether that worked."""
    try:
        fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)  # type: ignore[attr-defined, unused-ignore]
    except (NameError, AttributeError, OSError):  # no fcntl, as on Windows, or none of its flag, as on Linux
        return False
    return True


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
    """Raise an OSError for anything but a plain file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))


@contextmanager
def replacement(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of another when the block ends: whole, or not at all if the block raises.

    Its name is hidden, its own, and beside `path`. Leftovers of a killed process are removed by the next one that
    writes `path`: a file belongs to somebody as long as its lock is held, and locks end with their process.

    Raises
    ------
    OSError
        It cannot be written, or `path` is not a plain file.
    """
    import tempfile

    path = Path(path)
    with suppress(FileNotFoundError):
        refuse_special(path, os.stat(path))
    prefix = f".{path.name}."
    _remove_remains(path.parent, prefix)
    handle, temporary = tempfile.mkstemp(PART, prefix, path.parent)
    while not _ours(handle):  # another process tidied up between the making and the lock
        os.close(handle)
        handle, temporary = tempfile.mkstemp(PART, prefix, path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if sys.platform != "win32":  # before the lock ends
                os.replace(temporary, path)
        if sys.platform == "win32":
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def working_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory that is removed with its contents when the block ends.

    Those of killed processes in `parent` are removed first, if their names have this prefix and the file system has
    locks: as with `replacement`, a directory belongs to somebody as long as its lock is held.

    Raises
    ------
    OSError
        It cannot be made.
    """
    from tempfile import TemporaryDirectory

    if sys.platform == "win32":
        with TemporaryDirectory(prefix=prefix, dir=parent) as name:
            yield Path(name)
        return
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(path)
    while True:
        with TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
            handle = os.open(name, os.O_RDONLY)
            try:
                if _ours(handle):
                    yield Path(name)
                    return
            finally:
                os.close(handle)


def sync_directory(path: str | Path) -> None:
    """Make a rename durable; systems that cannot open directories (Windows) do this on their own."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ours(handle: int) -> bool:
    """Lock a new file; return whether it is still there."""
    if sys.platform == "win32":
        return True
    with suppress(OSError):  # a file system without locks: remains stay, as their owner is unknown
        fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fstat(handle).st_nlink > 0


def _remove_remains(directory: Path, prefix: str) -> None:
    """Remove the temporary files of processes that are no more."""
    for name in os.listdir(directory):
        if not (name.startswith(prefix) and name.endswith(PART)):
            continue
        with suppress(OSError):  # in use, or gone already
            if sys.platform == "win32":
                os.unlink(directory / name)
                continue
            with _locked(directory / name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                os.unlink(directory / name)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)
