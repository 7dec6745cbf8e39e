"""Rounded weights, and costs of types, of a conversion that did not end, beside the statistics that they follow from.

Rounding takes minutes for a billion weights. Each weight that is done has a copy in a file of its own, which another
conversion of the same checkpoint by the same text to the same types takes; one that ends removes all of them. A copy
ends with the errors of its rounding, the length of that text, and a checksum of everything before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer import __version__
from edgeinfer.base.files import replacement
from edgeinfer.quant import quantise, rounding

from .calibration import Calibration

PREFIX, PARTIAL = "rounded-", ".part"
ROOM = 3
"""Free bytes of the disk over those of the bundle without which no copies are made: it could be the bundle's disk."""
READ_BYTES = 16 << 20
LENGTH, CHECKSUM = 8, 32
Bytes = NDArray[np.uint8]


class Unfinished:
    """Copies of the weights that a conversion has rounded, and of the costs of types that it has measured.

    Parameters
    ----------
    folder : Path
        Directory of the statistics.
    method : str
        Of rounding; several may use the same statistics.
    """

    def __init__(self, folder: Path, method: str):
        self._folder, self._method = folder, method
        self.taken = 0
        """Weights that were taken from an earlier conversion."""

    def stored(self, key: tuple[Any, ...], sums: list[quantise.ErrorSums], nearest: list[str]
               ) -> Iterator[Bytes] | None:
        """Return the bytes of a weight, and add what `copied` knows of them; None without a whole copy."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size - CHECKSUM
                digest, left = hashlib.sha256(), end
                while left > 0 and (data := file.read(min(left, READ_BYTES))):
                    digest.update(data)
                    left -= len(data)
                if digest.digest() != file.read():
                    return None
                file.seek(end - LENGTH)
                length = int.from_bytes(file.read(LENGTH), "little")
                file.seek(end - LENGTH - length)
                note = json.loads(file.read(length))
        except OSError:
            return None
        self.taken += 1
        sums += [rounding.RoundingErrors(**one) for one in note["errors"]]
        nearest += note["nearest"]
        return _pieces(path, end - LENGTH - length)

    def copied(self, key: tuple[Any, ...], parts: Iterator[Bytes], sums: list[quantise.ErrorSums], nearest: list[str]
               ) -> Iterator[Bytes]:
        """Yield the bytes of a weight as they are made, and keep a copy; `sums` and `nearest` are complete then."""
        copy = _Copy(self._path(key))
        try:
            for part in parts:
                copy.add(memoryview(part).cast("B"))  # type: ignore[arg-type]
                yield part
            copy.finish(json.dumps({"errors": [vars(one) for one in sums], "nearest": nearest}).encode())
        finally:
            copy.give_up()

    def numbers(self, key: tuple[Any, ...], make: Callable[[], list[float]]) -> list[float]:
        """Return numbers that an earlier conversion has kept, or make and keep them."""
        path = self._path(key)
        with suppress(OSError, ValueError):
            found: list[float] = json.loads(path.read_text(encoding="utf-8"))
            return found
        found = make()
        with suppress(OSError), replacement(path) as file:
            file.write(json.dumps(found).encode())
        return found

    def end(self) -> list[str]:
        """Remove all copies, those of other types included, once the bundle is complete; say how many were taken."""
        for path in self._folder.glob(f"{PREFIX}*"):
            with suppress(OSError):
                path.unlink()
        return [f"Matrices that an interrupted conversion had rounded: {self.taken}."] if self.taken else []

    def _path(self, key: tuple[Any, ...]) -> Path:
        digest = hashlib.sha256(repr((__version__, self._method)).encode())
        for part in key:
            digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        return self._folder / f"{PREFIX}{digest.hexdigest()[:32]}"


def unfinished_of(calibration: Calibration | None, nbytes: int) -> Unfinished | None:
    """Return the copies of a calibrated conversion to so many bytes; None if the disk has no room for them."""
    if calibration is None or calibration.folder is None:
        return None
    try:
        room = shutil.disk_usage(calibration.folder).free > ROOM * nbytes
    except OSError:
        room = False
    return Unfinished(calibration.folder, calibration.method) if room else None


class _Copy:
    """A file in the making; one that cannot be written is given up, since it only saves time."""

    def __init__(self, path: Path):
        self._path, self._partial = path, path.with_suffix(PARTIAL)
        self._digest = hashlib.sha256()
        self._file: RawIOBase | None = None
        with suppress(OSError):
            self._file = self._partial.open("wb", buffering=0)

    def add(self, data: bytes | memoryview) -> None:
        if self._file is None:
            return
        self._digest.update(data)
        try:
            whole = self._file.write(data) == len(data)
        except OSError:
            whole = False
        if not whole:
            self.give_up()

    def finish(self, note: bytes) -> None:
        self.add(note + len(note).to_bytes(LENGTH, "little"))
        self.add(self._digest.digest())
        if self._file is not None:
            self._file.close()
            with suppress(OSError):
                os.replace(self._partial, self._path)

    def give_up(self) -> None:
        """Remove what is not complete."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)


def _pieces(path: Path, nbytes: int) -> Iterator[Bytes]:
    """Yield the first bytes of a file."""
    with path.open("rb") as file:
        while nbytes > 0 and (data := file.read(min(nbytes, READ_BYTES))):
            nbytes -= len(data)
            yield np.frombuffer(data, np.uint8)
