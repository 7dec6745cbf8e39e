"""Checksums of a bundle's data, compared on several threads, and the memory of files that passed.

A file that passed is not read again while its device, inode, size and times stay as they were. That it did is an empty
file in the user's cache, named after all this: to make one is a single step that no other process can disturb. Where
there is no cache to write to, each start compares.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from edgeinfer.base.cache_dir import cache_root, make_directories
from edgeinfer.base.files import open_plain
from edgeinfer.base.process import usable_cores
from edgeinfer.errors import BundleError

from ..base.dataclass import dataclass
from ..base.progress import OnStageProgress

REMEDY = "convert or copy the model again"
CHUNK_BYTES = 256 << 10
"""Read at a time by a thread: stays in its cache, and takes a memory that the plan need not know."""
MAX_THREADS = 8
"""No memory feeds more."""
SMALL_BYTES = 4 << 20
"""Up to here another thread is not worth its start."""
WAIT_SECONDS = 0.05
"""Longest wait before Ctrl-C and progress are looked at."""
KEPT_SECONDS = 180 * 86400
"""Age from which a file is compared again, half a year: disks lose data."""
SETTLED_NS = 50_000_000
"""A file is remembered once its times are older than the system's clock is coarse."""


@dataclass(frozen=True)
class Piece:
    """A part of a file and the checksum that it must have; a gap, which must be zero, has none."""

    path: Path
    what: str
    """Description for messages."""
    nbytes: int
    sha256: str = ""
    offset: int = 0
    parts: int = 1
    """Number of parts, `stride` bytes apart."""
    stride: int = 0


class Passed:
    """Tells whether files in their present state were compared before.

    Parameters
    ----------
    identity : str
        Checksums that they were compared with.
    states : for each file, its state by the system
    """

    def __init__(self, identity: str, states: Sequence[os.stat_result]):
        found = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states]
        self._newest_ns = max((time_ns for *_, mtime, ctime in found for time_ns in (mtime, ctime)), default=0)
        self._whole_seconds = any(mtime % 10**9 == 0 for *_, mtime, _ in found)  # of FAT: every second one
        self._began_ns = time.time_ns()
        self._path = cache_root() / "checks" / "passed" / hashlib.sha256(repr((identity, found)).encode()).hexdigest()

    def __bool__(self) -> bool:
        try:
            return time.time() - self._path.stat().st_mtime < KEPT_SECONDS
        except OSError:
            return False

    def remember(self) -> None:
        """Note that they are well, unless a change could still come that leaves their times as they are."""
        if self._began_ns - self._newest_ns < (2 * 10**9 if self._whole_seconds else SETTLED_NS):
            return
        with suppress(OSError):  # no cache: the next start compares again
            make_directories(self._path.parent)
            self._path.touch()
            for other in self._path.parent.iterdir():
                if time.time() - other.stat().st_mtime > KEPT_SECONDS:
                    other.unlink()


def compare(pieces: Sequence[Piece], threads: int | None = None, progress: OnStageProgress | None = None) -> None:
    """Read all pieces and compare them.

    Parameters
    ----------
    pieces : sequence of Piece
    threads : int, optional
        By default those that this process may use.
    progress : callable, optional
        Called with (bytes done, bytes in all, file name).

    Raises
    ------
    BundleError
        A piece differs or cannot be read; a clause that names it.
    """
    work = _Work(pieces)
    n = min(threads or usable_cores(), MAX_THREADS, len(pieces)) if work.total > SMALL_BYTES else 0
    helpers = [threading.Thread(target=work.run, daemon=True, name="edgeinfer-check") for _ in range(n)]
    try:
        with suppress(RuntimeError):  # the system refuses a thread
            for helper in helpers:
                helper.start()
        while living := [helper for helper in helpers if helper.is_alive()]:
            living[0].join(WAIT_SECONDS)
            if progress:
                progress(work.done, work.total, work.name)
        work.run()  # the rest that no thread took: all, if it is little
    finally:
        work.stopped = True  # after an interruption, each ends with its chunk
        for helper in helpers:
            if helper.is_alive():
                helper.join()
    if work.faults:
        raise BundleError(min(work.faults)[1])
    if progress:
        progress(work.total, work.total, work.name)


class _Work:
    """The pieces that are still to be compared: the largest first, so that no thread is left with one at the end."""

    def __init__(self, pieces: Sequence[Piece]):
        self._left = sorted(enumerate(pieces), key=lambda item: item[1].nbytes)
        self._lock = threading.Lock()
        self.total = sum(piece.nbytes for piece in pieces)
        self.done, self.name, self.stopped = 0, "", False
        self.faults: list[tuple[int, str]] = []

    def run(self) -> None:
        """Take pieces until none is left or one is damaged."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with ExitStack() as stack:
            files: dict[Path, io.BufferedReader] = {}
            while self._left and not self.stopped:
                try:
                    index, piece = self._left.pop()
                except IndexError:  # another thread took it
                    return
                self.name = piece.path.name
                try:
                    if piece.path not in files:
                        files[piece.path] = stack.enter_context(open_plain(piece.path))
                    self._compare(piece, files[piece.path], buffer)
                except OSError as error:
                    self._fault(index, f"{piece.path.name} cannot be read: {error.strerror or error}.")
                except BundleError as error:
                    self._fault(index, str(error))
                except Exception as error:  # of a thread: it would be lost otherwise
                    self._fault(index, f"{piece.path.name} could not be compared ({type(error).__name__}).")

    def _fault(self, index: int, sentence: str) -> None:
        self.faults.append((index, sentence))
        self.stopped = True

    def _compare(self, piece: Piece, file: io.BufferedReader, buffer: memoryview) -> None:
        digest, clean, own = hashlib.sha256(), True, piece.nbytes // piece.parts
        for number in range(piece.parts):
            at, left = piece.offset + number * piece.stride, own
            file.seek(at)
            while left and not self.stopped:
                part = buffer[: min(left, len(buffer))]
                got = file.readinto(part)
                if not got:
                    raise BundleError(f"{piece.path.name} ends before byte {at + own}; {REMEDY}.")
                if piece.sha256:
                    digest.update(part[:got])
                else:
                    clean = clean and part[:got].tobytes().count(0) == got
                left -= got
                with self._lock:
                    self.done += got
            if left:
                return
        if piece.sha256 and digest.hexdigest() != piece.sha256:
            raise BundleError(f"the {piece.what} is damaged: its checksum does not match; {REMEDY}.")
        if not clean:
            raise BundleError(f"the {piece.what} is not zero; {REMEDY}.")
