"""A file or directory that appears when it is complete, or not at all, and may replace another one."""

from __future__ import annotations

import abc
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from ..errors import DestinationError
from .files import sync_directory
from .lock import DestinationLock
from .units import format_size
from .validation import PATH, checked

Own = TypeVar("Own", bound="Destination")


class Destination(abc.ABC):
    """Something in the making; a context manager that leaves it complete in its place, or nothing.

    It is made in a hidden folder beside its place, under a unique name. Its maker holds a lock, and removes leftovers
    of killed processes. If locks do not exist, two at once do the work twice, and the result of one of them stays.

    Parameters
    ----------
    path : str or Path
        If it is to be.
    overwrite : bool
        Replace an existing destination of the same kind. A link stays, and its target is replaced.
    waiting : callable, optional
        Called twice a second while another process writes this; without it that is refused.

    Raises
    ------
    DestinationError
        It is not a path, or has no name. On entering: something is there that is not to be replaced, or another process
        writes it. Later: it cannot be written.
    """

    kind: ClassVar[str]
    """Name of the kind of output, for messages."""
    mark: ClassVar[str]
    """A file that every directory of this kind has."""
    permission: ClassVar[str]
    """Option that permits overwriting, for messages."""

    def __init__(self, path: str | Path, overwrite: bool, waiting: Callable[[], object] | None = None):
        path = checked("The destination", path, PATH, DestinationError)
        self.path = Path(os.path.abspath(path))
        if overwrite and self.path.is_symlink() and self.path.exists():
            self.path = self.path.resolve()
        if not self.path.name:
            raise DestinationError(f"{path} is not a place for {self.kind}; name a directory that is to be made.")
        self._overwrite, self._waiting = overwrite, waiting
        self._lock = DestinationLock(self.path)
        self.folder = self._beside("partial")
        """The folder in which it is made."""

    def __enter__(self: Own) -> Own:
        self._refuse_existing()
        try:
            with self.writing():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self._lock.acquire(self._waiting):
                    self._clear_remains()
                self._refuse_existing()  # another process may have finished while we looked
                self.folder.mkdir()
                self._begin()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self.writing():
                    self._commit()
        finally:
            self._abandon()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say in one sentence why the destination cannot be written."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DestinationError(f"The disk is full: {self.path} could not be written; free some space and try "
                                       "again. Nothing was left behind.") from None
            raise DestinationError(f"Cannot write {self.path}: {error.strerror or error}.") from None

    def reserve(self, nbytes: int) -> None:
        """Refuse to start where the disk has no room for this many bytes."""
        free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise DestinationError(f"{self.path} needs {format_size(nbytes)}, but its disk has only "
                                   f"{format_size(free)} free; free some space or choose another place.")

    @abc.abstractmethod
    def _objection(self) -> str | None:
        """Return why an existing destination is not replaced though that was requested, in words that follow its name;
        or None."""

    @abc.abstractmethod
    def _commit(self) -> None:
        """Complete the files in `folder`, and put it into its place; a directory by `_replace`."""

    def _begin(self) -> None:  # noqa: B027
        """Open the necessary files in `folder`, which exists and is empty."""

    def _replace(self) -> None:
        """Put the complete directory into its place; an older one stays until that has worked."""
        sync_directory(self.folder)
        if self.path.exists():
            old = self._beside("old")
            os.rename(self.path, old)
            try:
                os.rename(self.folder, self.path)
            except BaseException:
                os.rename(old, self.path)
                raise
            gone = self._beside("partial")
            os.rename(old, gone)  # half of it is nothing to put back
            shutil.rmtree(gone, ignore_errors=True)
        else:
            os.rename(self.folder, self.path)
        sync_directory(self.path.parent)

    def _abandon(self) -> None:
        """Remove whatever is not in its place, and let others write."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self._overwrite:
            raise DestinationError(f"{self.path} already exists; choose another name, or {self.permission}.")
        if objection := self._objection():
            raise DestinationError(f"{self.path} {objection}")

    def _clear_remains(self) -> None:
        """Remove remains of killed writers of this destination: no other process writes it, because the lock is ours.

        One that was killed while it replaced a directory has left none in its place; that one goes back first.
        """
        ours = re.compile(rf"\.{re.escape(self.path.name)}(\.[0-9a-f]{{16}})?\.(partial|old)")
        for path in sorted(self.path.parent.iterdir()):
            if ours.fullmatch(path.name):
                whole = path.suffix == ".old" and (path / self.mark).is_file()
                if whole and not os.path.lexists(self.path):
                    os.rename(path, self.path)
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def _beside(self, kind: str) -> Path:
        """Return a hidden name beside the destination that is unique, also across containers."""
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.{kind}")
