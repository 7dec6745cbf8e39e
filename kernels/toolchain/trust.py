"""Ownership checks before linking: objects are code, so only this user and root may be able to change them.

Owner and mode of each directory of the path are checked, links included; the path then still leads to the same place,
because no one else can change it. A file is opened first, and the open file is checked and read. Access control lists
are not checked, and on Windows nothing is: files have no such owner there, and the profile's directory is the user's
own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.errors import KernelError

_MAX_LINKS = 40


def distrust(path: Path) -> str:
    """Return, as a clause, who else could change `path`, or nothing; parts that do not exist yet are skipped."""
    if os.name == "nt":
        return ""
    try:
        for step, status in _steps(path):
            if why := _fault(status):
                return f"{step} {why}"
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return ""


def read_own(path: Path) -> bytes:
    """Read a file that no other user can change.

    Raises
    ------
    KernelError
        It is not ours, others may write it, or it is no file.
    OSError
        It cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise KernelError(f"{path.name} is no file")
        if os.name != "nt" and (why := _fault(status)):
            raise KernelError(f"{path.name} {why}")
        return file.read()


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each directory and link of a path, and the link targets."""
    whole = Path(os.path.abspath(path))
    current, parts, links = Path(whole.anchor), list(whole.parts[1:]), 0
    yield current, os.lstat(current)
    while parts:
        part = parts.pop(0)
        step = current.parent if part == ".." else current / part
        status = os.lstat(step)
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            current = step
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(step))
        current = Path(target.anchor) if target.is_absolute() else current
        parts = [*(target.parts[1:] if target.is_absolute() else target.parts), *parts]


def _fault(status: os.stat_result) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({status.st_uid})"
    # Users cannot move each other's files in a sticky directory such as /tmp.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if stat.S_ISLNK(status.st_mode) or sticky:
        return ""
    by_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return "can be written by others" if by_group or status.st_mode & stat.S_IWOTH else ""


def _is_private_group(number: int) -> bool:
    """Return whether a group has this user alone, as many systems make one for each: then writable by it is no more."""
    import grp
    import pwd

    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        return user.pw_gid == number and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    return False
