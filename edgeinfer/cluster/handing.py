"""Prompts that another replica has computed: their KV blocks go over in pieces, as files of prompt caches."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from ..base.cache_dir import cache_root, make_directories
from ..server import in_thread
from .job import Handed, WorkerLost

PIECE_BYTES = 16 << 20
"""Bytes that go at a time."""
REMAINS_SECONDS = 3600.0
"""Age at which the folder of a process that is no more is deleted."""


class Received(NamedTuple):
    """A prompt that has come."""

    nbytes: int
    seconds: float


class Handing:
    """Files of prompts that leave this process or have come."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._files: dict[int, Path] = {}

    def path(self, key: int) -> Path:
        """Return a file for the prompt of a job."""
        if self._folder is None:
            self._folder = _own_folder()
        self._files[key] = path = self._folder / str(key)
        return path

    def drop(self, key: int) -> None:
        """Delete the file of a job, if there is one, and after the last one their folder."""
        if (path := self._files.pop(key, None)) is not None:
            path.unlink(missing_ok=True)
        if self._folder is not None and not self._files:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def piece(self, key: int, number: int) -> bytes | None:
        """Return a piece of a file, which is deleted after the last one; None if there is no such file."""
        if (path := self._files.get(key)) is None:
            return None
        data, last = await in_thread(lambda: _piece(path, number))
        if last:
            self.drop(key)
        return data

    async def receive(self, key: int, handed: Handed) -> Received | None:
        """Take the prompt of a job from the replica that has computed it; None if it is lost on the way or dropped."""
        began, nbytes = time.monotonic(), 0
        try:
            with open(self.path(key), "wb") as file:
                for number in range(-(-handed.nbytes // PIECE_BYTES)):
                    data = await handed.sender.piece(number)
                    nbytes += await in_thread(lambda data=data: file.write(data))  # type: ignore[misc]
        except (WorkerLost, OSError):  # the link is down, or the disk is full
            self.drop(key)
            return None
        return Received(nbytes, time.monotonic() - began) if key in self._files else None


def _piece(path: Path, number: int) -> tuple[bytes, bool]:
    with open(path, "rb") as file:
        file.seek(number * PIECE_BYTES)
        return file.read(PIECE_BYTES), file.tell() == os.fstat(file.fileno()).st_size


def _own_folder() -> Path:
    """Return a folder of this process, and delete those of processes that were killed."""
    make_directories(folder := cache_root() / "cluster")
    for old in folder.glob("prompts-*"):
        pid = int(old.name.split("-")[1])
        if time.time() - old.stat().st_mtime > REMAINS_SECONDS and not psutil.pid_exists(pid):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp("", f"prompts-{os.getpid()}-", folder))
