"""Prompts that another replica computes: their KV blocks go over in pieces, while the rest is computed."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ..base.cache_dir import cache_root, make_directories
from ..server import in_thread
from .job import WorkerLost

PIECE_BYTES = 2 << 20
"""Most bytes sent at a time: while they are copied into blocks, the thread that decodes may wait for Python's lock. A
part of a prompt is sent in one piece unless it is longer."""
REMAINS_SECONDS = 3600.0
"""Age at which the folder of a process that is no more is deleted."""
_HEAD = struct.Struct("<QQ")
"""Size and checksum before each part. The checksum costs the replica that decodes a fifth of a hash."""


class Piece(NamedTuple):
    """Bytes of a prompt."""

    data: bytes
    more: bool
    """True if others follow."""
    waited: float
    """Seconds until they were there."""


class Outgoing:
    """A prompt that leaves this process: a file that grows. It belongs to the loop in which it is made, but for `add`.

    Parameters
    ----------
    path : of the file
    """

    def __init__(self, path: Path):
        self._path, self._file = path, open(path, "wb", buffering=0)  # noqa: SIM115 - closed by `end`
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self.nbytes = 0
        self._ends = deque[int]()
        self.ended = self._failed = False

    def add(self, part: bytes) -> None:
        """Write a part; from any thread. Raises `OSError`."""
        head = _HEAD.pack(len(part), zlib.crc32(part))
        for data in (head, part):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        self._loop.call_soon_threadsafe(self._grow, len(head) + len(part))

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._ends.append(self.nbytes)
        self._changed.set()

    def end(self, failed: bool = False) -> None:
        """Note that nothing follows, or that the prompt was not computed."""
        self._file.close()
        self.ended, self._failed = True, self._failed or failed
        self._changed.set()

    async def piece(self, offset: int) -> Piece | None:
        """Return the bytes from an offset on, once there are some; None if the prompt was not computed."""
        began = time.monotonic()
        while self.nbytes <= offset and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        waited = time.monotonic() - began
        if self._failed:
            return None
        while self._ends and self._ends[0] <= offset:
            self._ends.popleft()
        end = min(self._ends[0] if self._ends else offset, offset + PIECE_BYTES)
        data = await in_thread(lambda: self._read(offset, end - offset))
        return Piece(data, not self.ended or offset + len(data) < self.nbytes, waited)

    def _read(self, offset: int, n: int) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(n)

    def delete(self) -> None:
        """Delete the file; who reads it gets nothing more."""
        self.end(failed=True)
        self._path.unlink(missing_ok=True)


class Handing:
    """Prompts that leave this process."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._prompts: dict[int, Outgoing] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, key: int) -> Outgoing:
        """Return a prompt of a job, which leaves while it is computed; raises `OSError`."""
        if self._folder is None:
            self._folder = _own_folder()
        self._prompts[key] = prompt = Outgoing(self._folder / str(key))
        return prompt

    def drop(self, key: int) -> None:
        """Delete the prompt of a job, if there is one, and after the last one their folder."""
        if (prompt := self._prompts.pop(key, None)) is not None:
            prompt.delete()
        if self._folder is not None and not self._prompts:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def piece(self, key: int, offset: int) -> Piece | None:
        """Return a piece of a prompt, which is deleted after the last one; None if there is no such prompt."""
        if (prompt := self._prompts.get(key)) is None:
            return None
        try:
            found = await prompt.piece(offset)
        except OSError:
            found = None
        if found is None or not found.more:
            self.drop(key)
        return found


class Incoming:
    """A prompt that comes from another replica.

    Parameters
    ----------
    sender : as `Job.handed`
    unwanted : returns whether the rest is of no use any more

    Attributes
    ----------
    nbytes : int
        Those that have come.
    seconds : float
        Time that they were on the way.
    """

    def __init__(self, sender: Any, unwanted: Callable[[], bool]):
        self._sender, self._unwanted = sender, unwanted
        self.nbytes, self.seconds = 0, 0.0

    async def parts(self) -> AsyncIterator[memoryview]:
        """Yield the parts in order, each as soon as it has come whole; raises `WorkerLost` if one is lost."""
        begun, piece = b"", Piece(b"", True, 0.0)
        while piece.more and not self._unwanted():
            began = time.monotonic()
            piece = Piece(*await self._sender.piece(self.nbytes))
            self.seconds += max(0.0, time.monotonic() - began - piece.waited)
            self.nbytes += len(piece.data)
            begun = begun + piece.data if begun else piece.data
            if len(begun) < _HEAD.size or len(begun) < _HEAD.size + (head := _HEAD.unpack_from(begun))[0]:
                continue
            part, begun = memoryview(begun)[_HEAD.size :], b""
            if len(part) != head[0] or await in_thread(lambda part=part: zlib.crc32(part)) != head[1]:  # type: ignore[misc]
                raise WorkerLost("its data is damaged")
            yield part
        if begun and not piece.more:
            raise WorkerLost("its data is cut short")


def _own_folder() -> Path:
    """Return a folder of this process, and delete those of processes that were killed."""
    make_directories(folder := cache_root() / "cluster")
    for old in folder.glob("prompts-*"):
        pid = int(old.name.split("-")[1])
        if time.time() - old.stat().st_mtime > REMAINS_SECONDS and not psutil.pid_exists(pid):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp("", f"prompts-{os.getpid()}-", folder))
