"""The output of a batch: lines that are appended whole, in a file that a later run continues."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...base.files import open_plain, sync_directory
from ...base.lock import DestinationLock
from ...errors import DestinationError
from ..models import in_thread
from .rows import Row

HEAD, MARK = b'{"id":"', "batch_req_"
SYNC_SECONDS = 1.0
"""Interval between calls of fsync: a power cut loses at most the results of the last one."""
SUCCESS = 200
CONTINUE = "; the same command continues with the answers that it has"
_BEGINNING = HEAD + MARK.encode()


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None = None


class Results:
    """Appends answers to a file. A context manager, which holds the file's lock.

    Lines that a former run has written stay, and the beginning of one that a killed run left behind is cut off. A file
    without any line is removed in the end.

    Parameters
    ----------
    path : where the answers go
    rows : requests that are answered there
    model : name of their model

    Attributes
    ----------
    done : set of str
        custom_id of the requests that the file answers.
    model : str
    failed : int
        How many of them have another status than 200.

    Raises
    ------
    DestinationError
        The file has answers to other requests, is being written, or cannot be written.
    """

    def __init__(self, path: str | Path, rows: Iterable[Row], model: str):
        self.path, self.model = Path(path), model
        self.done, self.failed = set[str](), 0
        self._ids = {row.custom_id: self.id_of(row, model) for row in rows}
        self._lock = DestinationLock(Path(os.path.abspath(path)))
        self._handle, self._size, self._synced = -1, 0, time.monotonic()

    @staticmethod
    def id_of(row: Row, model: str) -> str:
        """Return the id of an answer: it follows from the request, so that answers to other requests are recognised."""
        return MARK + hashlib.sha256(f"{row.digest}{model}".encode()).hexdigest()[:24]

    def __enter__(self) -> Results:
        if not (folder := Path(os.path.abspath(self.path)).parent).is_dir():  # the lock's library would make it
            raise DestinationError(f"Cannot write {self.path}: there is no folder {folder}; create it first.")
        try:
            self._lock.acquire()
            if self.path.exists():
                with open_plain(self.path) as file:
                    self._size = self._read(file)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            os.ftruncate(self._handle, self._size)
            os.lseek(self._handle, self._size, os.SEEK_SET)
            sync_directory(self.path.parent)
        except OSError as error:
            self._lock.release()
            raise self._unwritten(error) from None
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._sync()
        finally:
            os.close(self._handle)
            if not self._size:
                self.path.unlink(missing_ok=True)
            self._lock.release()

    def write(self, custom_id: str, status: int, line: bytes) -> None:
        """Append the answer to a request."""
        data = line + b"\n"
        try:
            written = os.write(self._handle, data)
            while written < len(data):
                written += os.write(self._handle, data[written:])
        except OSError as error:
            os.ftruncate(self._handle, self._size)
            os.lseek(self._handle, self._size, os.SEEK_SET)  # another request may be about to write
            raise self._unwritten(error, CONTINUE) from None
        self._size += len(data)
        self.done.add(custom_id)
        self.failed += status != SUCCESS
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise self._unwritten(error, CONTINUE) from None
        self._synced = time.monotonic()

    def _read(self, file: BinaryIO) -> int:
        """Record the answered rows, and return where the whole lines end."""
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if not line.startswith(_BEGINNING[:len(line)]):
                    raise self._other(number)
                break
            try:
                found = msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise self._other(number) from None
            if self._ids.get(found.custom_id) != found.id or found.custom_id in self.done:
                raise self._other(number)
            self.done.add(found.custom_id)
            self.failed += found.response is None or found.response.status_code != SUCCESS
            end += len(line)
        return end

    def _other(self, number: int) -> DestinationError:
        return DestinationError(f"Line {number} of {self.path} answers no request of this input and model; name "
                                "another output, or remove that file.")

    def _unwritten(self, error: OSError, remedy: str = "") -> DestinationError:
        return DestinationError(f"Cannot write {self.path}: {error.strerror or error}{remedy}.")


@contextlib.asynccontextmanager
async def opened(results: Results) -> AsyncIterator[Results]:
    """Open a file of answers in a thread, as there may be many from a former server; closed in any case."""
    opening = asyncio.ensure_future(in_thread(results.__enter__))
    try:
        yield await asyncio.shield(opening)
    finally:
        await asyncio.wait((opening,))
        if opening.exception() is None:
            results.__exit__()
