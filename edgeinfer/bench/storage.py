"""Read speed of storage, in order and scattered, past the page cache: on a temporary file that is always removed."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..base.dataclass import dataclass
from ..base.files import uncached
from ..base.progress import OnStageProgress
from ..base.units import format_size
from ..errors import DestinationError
from ..runtime import allocate

CHUNK_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
QUEUE_DEPTHS = (1, 8)
WRITE_BYTES = 4 << 20
HUGE_BYTES = 2 << 20
"""Page size of the memory that is read into, as in runs: a read into small pages reaches a disk in parts
(docs/explanation/experts.md)."""
MIN_FILE_BYTES = 64 << 20
SPARE_BYTES = 256 << 20
"""Free space that the file leaves."""


@dataclass(frozen=True)
class StorageSpeed:
    """Read speeds of the file in GB/s."""

    sequential_gbs: float
    """The better of one thread and of the deepest queue, pieces of 4 MiB in order."""
    random_gbs: dict[int, tuple[tuple[int, float], ...]]
    """Pairs of (bytes of a piece, GB/s), per queue depth."""
    file_bytes: int
    direct: bool
    """True if the page cache was out of the way."""


class StorageProbe:
    """A file of random bytes in a directory, for reading. A context manager, which removes it.

    Parameters
    ----------
    directory : Path
        On the storage to measure.
    file_bytes : int
        Wanted size; smaller where the disk is nearly full.
    seconds : float
        Duration of each measurement.

    Raises
    ------
    DestinationError
        The directory cannot be written, or the disk is full.
    """

    def __init__(self, directory: Path, file_bytes: int, seconds: float = 0.3):
        self.seconds, self._path = seconds, directory / f".probe-{os.getpid()}.tmp"
        self._file = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.file_bytes = _fitting(directory, file_bytes)
            self._file, self.direct = _open(self._path)
            _fill(self._file, self.file_bytes)
        except OSError as error:
            self.close()
            raise DestinationError(_refusal(error, directory, file_bytes)) from error
        except BaseException:  # Ctrl-C while it is written
            self.close()
            raise

    def measure(self, progress: OnStageProgress | None = None) -> StorageSpeed:
        """Read in order, then scattered pieces of every size at every queue depth."""
        steps = [(depth, size) for depth in QUEUE_DEPTHS for size in CHUNK_SIZES]
        in_order = max(self.read_gbs(WRITE_BYTES, depth, scattered=False) for depth in QUEUE_DEPTHS)
        found: dict[int, list[tuple[int, float]]] = {depth: [] for depth in QUEUE_DEPTHS}
        for done, (depth, size) in enumerate(steps):
            if progress:
                progress(done, len(steps), f"{format_size(size)}, queue of {depth}")
            found[depth].append((size, self.read_gbs(size, depth)))
        curves = {depth: tuple(points) for depth, points in found.items()}
        return StorageSpeed(in_order, curves, self.file_bytes, self.direct)

    def read_gbs(self, size: int, depth: int, scattered: bool = True) -> float:
        """Return the GB/s of reading pieces of `size` bytes by `depth` threads at once, each waiting for its own.

        Threads stand for the queue, as in the runtime; at 4 KiB Python's own time of some microseconds a read counts.
        """
        self._forget()
        slots = self.file_bytes // size
        done, errors = [0] * depth, []
        buffers = [allocate(max(size, HUGE_BYTES))[:size].data for _ in range(depth)]
        began = time.perf_counter()
        ended = began + self.seconds

        def work(thread: int) -> None:
            numbers = random.Random(thread)
            at = slots * thread // depth
            try:
                while not done[thread] or time.perf_counter() < ended:
                    at = numbers.randrange(slots) if scattered else (at + 1) % slots
                    done[thread] += _read(self._file, buffers[thread], at * size)
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(depth)]
        for one in threads:
            one.start()
        try:
            for one in threads:
                one.join()
        except BaseException:  # Ctrl-C: the file stays open until its last reader ends
            ended = 0.0
            for one in threads:
                one.join()
            raise
        if errors:
            raise DestinationError(f"Reading the probe's file {self._path} failed: {errors[0].strerror or errors[0]}.")
        return sum(done) / (time.perf_counter() - began) / 1e9

    def close(self) -> None:
        """Remove the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with suppress(OSError):
            self._path.unlink()

    def __enter__(self) -> StorageProbe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget(self) -> None:
        """Ask the system to drop the file from the page cache, where direct I/O was refused."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def _fitting(directory: Path, wanted: int) -> int:
    """Return the size of the file that the disk has room for."""
    free = shutil.disk_usage(directory).free
    size = min(wanted, (free - SPARE_BYTES) // WRITE_BYTES * WRITE_BYTES) if wanted >= MIN_FILE_BYTES else wanted
    if size < min(wanted, MIN_FILE_BYTES) or free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return size


def _open(path: Path) -> tuple[int, bool]:
    """Open a new file for direct I/O, or without it where the system or the file system has none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        try:
            return _hidden(path, os.open(path, flags | os.O_DIRECT, 0o600)), True
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            if error.errno != errno.EINVAL:
                raise
    file = os.open(path, flags, 0o600)
    return _hidden(path, file), uncached(file)


def _hidden(path: Path, file: int) -> int:
    """Take the name away where open files may lose theirs: then nothing is left behind, whatever ends the process."""
    with suppress(OSError):
        path.unlink()
    return file


def _fill(file: int, nbytes: int) -> None:
    """Write random bytes, so that no layer below can compress them, and wait until they are stored."""
    with mmap.mmap(-1, WRITE_BYTES) as buffer:
        for _ in range(nbytes // WRITE_BYTES):
            buffer[:] = random.randbytes(WRITE_BYTES)
            written = 0
            while written < WRITE_BYTES:  # a disk that is nearly full takes less first, and refuses then
                with memoryview(buffer) as view, view[written:] as rest:
                    written += os.write(file, rest)
    os.fsync(file)


def _read(file: int, buffer: memoryview, offset: int) -> int:
    """Read a piece; other threads run meanwhile."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [buffer], offset)
    with _SEEK:
        os.lseek(file, offset, os.SEEK_SET)
        return len(os.read(file, len(buffer)))


_SEEK = threading.Lock()


def _refusal(error: OSError, directory: Path, wanted: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (f"The disk of {directory} is too full for the probe's file of {format_size(wanted)} (at least "
                f"{format_size(MIN_FILE_BYTES)} and {format_size(SPARE_BYTES)} to spare); free some, move the "
                "directory with EDGEINFER_CACHE, or leave storage out with --quick.")
    return (f"The probe's file cannot be written into {directory}: {error.strerror or error}; EDGEINFER_CACHE moves "
            "the directory, --quick leaves storage out.")
