"""Write a bundle: streaming, into a hidden directory beside the destination that is renamed when it is complete."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edgeinfer import __version__
from edgeinfer.errors import BundleError, CheckpointError, DestinationError
from edgeinfer.files import open_plain, sync_directory
from edgeinfer.graph import ModelConfig
from edgeinfer.json_text import parse_json
from edgeinfer.lock import DestinationLock
from edgeinfer.quant import WeightType

from .format import (
    PARTS,
    WEIGHTS_FILE,
    FileEntry,
    Header,
    Quantisation,
    TensorEntry,
    end_of_file,
    next_offset,
)
from .header import HEADER_FILE, header_from_json, header_to_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Data = bytes | bytearray | memoryview | NDArray[np.uint8]

COPY_BYTES = 8 << 20


class BundleWriter:
    """A bundle in the making; a context manager that either leaves a complete bundle or nothing.

    Parameters
    ----------
    destination : str or Path
        Directory to make; it must not exist unless `overwrite`.
    config : ModelConfig
    quantisation : Quantisation
    overwrite : bool
        Replace an existing bundle (never a directory that is no bundle).
    source : str
        Where the weights came from, for people.
    waiting : callable, optional
        Called twice a second while another process writes the destination; without it that is refused.

    Raises
    ------
    DestinationError
        On entering: if the destination exists or another process writes it. Later: if the disk is full.
    """

    def __init__(self, destination: str | Path, config: ModelConfig, quantisation: Quantisation, *,
                 overwrite: bool = False, source: str = "", waiting: Callable[[], object] | None = None):
        self.destination = Path(os.path.abspath(destination))
        if overwrite and self.destination.is_symlink() and self.destination.exists():  # the link stays
            self.destination = self.destination.resolve()
        if not self.destination.name:
            raise DestinationError(f"{destination} is no place for a bundle; name a directory that is to be made.")
        self._config = config
        self._quantisation = quantisation
        self._overwrite = overwrite
        self._source = source
        self._waiting = waiting
        self._partial = self._beside("partial")
        self._lock = DestinationLock(self.destination)
        self._file: BinaryIO | None = None
        self._offset = 0
        self._tensors: list[TensorEntry] = []
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> BundleWriter:
        self._refuse_existing()
        try:
            with self._writing():
                self.destination.parent.mkdir(parents=True, exist_ok=True)
                if self._lock.acquire(self._waiting):
                    self._clear_remains()
                self._refuse_existing()  # another process may have finished while we looked
                self._partial.mkdir()
                self._file = open(self._partial / WEIGHTS_FILE, "wb")
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._commit()
        finally:
            self._abandon()

    def reserve(self, nbytes: int) -> None:
        """Refuse to start where the disk has no room for this many bytes."""
        free = shutil.disk_usage(self._partial).free
        if free < nbytes:
            raise DestinationError(
                f"{self.destination} needs {nbytes / 1e6:.0f} MB, but its disk has only {free / 1e6:.0f} MB free; "
                "free some space or choose another place."
            )

    def add(
        self, name: str, weight_type: WeightType, shape: tuple[int, ...], data: Data | Iterable[Data]
    ) -> TensorEntry:
        """Append one tensor.

        Parameters
        ----------
        name : str
            Name in the tensor table.
        weight_type : WeightType
            Layout, type and group size of the stored bytes.
        shape : tuple of int
            Logical shape, without padding.
        data : bytes-like, uint8 array, or iterable of these
            The stored bytes, in order; streamed, so a large tensor never has to be in memory as a whole.

        Returns
        -------
        TensorEntry
        """
        nbytes = weight_type.nbytes(shape)
        offset = next_offset(self._offset, nbytes)
        digest, written = hashlib.sha256(), 0
        chunks = [data] if isinstance(data, bytes | bytearray | memoryview) or hasattr(data, "dtype") else data
        with self._writing():
            self._weights.write(bytes(offset - self._offset))
        for chunk in chunks:
            view = memoryview(chunk).cast("B")  # type: ignore[arg-type]
            digest.update(view)
            with self._writing():
                self._weights.write(view)
            written += len(view)
        if written != nbytes:
            raise BundleError(f"tensor {name!r} was given {written} bytes; its shape and type need {nbytes}.")
        entry = TensorEntry(name, weight_type, tuple(shape), offset, nbytes, digest.hexdigest())
        self._tensors.append(entry)
        self._offset = offset + nbytes
        return entry

    def copy_file(self, path: str | Path, name: str | None = None, part: str = "") -> FileEntry:
        """Copy a file (tokenizer, chat template, licence) into the bundle, under its own name or `name`."""
        path = Path(path)
        return self._add_file(name or path.name, _chunks(path), part)

    def add_file(self, name: str, content: bytes | Iterable[bytes], part: str = "") -> FileEntry:
        """Write a file into the bundle; `part` says which optional part of the model it is, if it is one."""
        return self._add_file(name, [content] if isinstance(content, bytes) else content, part)

    def stored(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """Return the bytes of a tensor that was added, mapped from the file that is being written."""
        import numpy as np

        with self._writing():
            self._weights.flush()
        return np.memmap(self._partial / WEIGHTS_FILE, np.uint8, "r", entry.offset, (entry.nbytes,))

    @property
    def folder(self) -> Path:
        """Where its files lie until it is complete."""
        return self._partial

    @property
    def _weights(self) -> BinaryIO:
        if self._file is None:
            raise BundleError(f"the bundle {self.destination} is not open for writing.")
        return self._file

    def _add_file(self, name: str, chunks: Iterable[bytes], part: str) -> FileEntry:
        if part and part not in PARTS:
            raise BundleError(f"{part!r} is no part of a model; the parts are {', '.join(PARTS)}.")
        if Path(name).name != name or name in self._files or name in (WEIGHTS_FILE, HEADER_FILE):
            raise BundleError(f"{name!r} cannot be the name of a further file in the bundle.")
        digest, nbytes = hashlib.sha256(), 0
        with self._writing(), open(self._partial / name, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                nbytes += len(chunk)
            _sync(file)
        entry = self._files[name] = FileEntry(name, nbytes, digest.hexdigest(), part)
        return entry

    def _commit(self) -> None:
        end = end_of_file(self._offset)
        self._weights.write(bytes(end - self._offset))
        _sync(self._weights)
        self._weights.close()
        header = Header(self._config, self._quantisation, tuple(self._tensors), tuple(self._files.values()), end,
                        self._source, f"edgeinfer {__version__}")
        text = header_to_json(header)
        header_from_json(text)  # what this version writes, it reads
        with open(self._partial / HEADER_FILE, "wb") as file:
            file.write(text)
            _sync(file)
        sync_directory(self._partial)
        self._rename()
        sync_directory(self.destination.parent)

    def _rename(self) -> None:
        """Put the complete directory in its place; an older bundle stays until that has worked."""
        if not self.destination.exists():
            os.rename(self._partial, self.destination)
            return
        old = self._beside("old")
        os.rename(self.destination, old)
        try:
            os.rename(self._partial, self.destination)
        except BaseException:
            os.rename(old, self.destination)
            raise
        gone = self._beside("partial")
        os.rename(old, gone)  # half of it is nothing to put back
        shutil.rmtree(gone, ignore_errors=True)

    def _beside(self, kind: str) -> Path:
        """A hidden name beside the destination that nobody else has, in whichever container."""
        return self.destination.with_name(f".{self.destination.name}.{secrets.token_hex(8)}.{kind}")

    def _clear_remains(self) -> None:
        """Remove what writers of this destination left that were killed: nobody else writes it, for the lock is ours.

        One that was killed while it replaced a bundle has left none in its place; that one goes back first.
        """
        ours = re.compile(rf"\.{re.escape(self.destination.name)}(\.[0-9a-f]{{16}})?\.(partial|old)")
        for path in sorted(self.destination.parent.iterdir()):
            if ours.fullmatch(path.name):
                whole = path.suffix == ".old" and (path / HEADER_FILE).is_file()
                if whole and not os.path.lexists(self.destination):
                    os.rename(path, self.destination)
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def _abandon(self) -> None:
        """Close and remove whatever is not part of a complete bundle."""
        if self._file is not None:
            with suppress(OSError):  # a full disk refuses the buffered rest, which nobody needs any more
                self._file.close()
            self._file = None
        shutil.rmtree(self._partial, ignore_errors=True)
        self._lock.release()

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.destination):
            return
        if not self._overwrite:
            raise DestinationError(f"{self.destination} already exists; choose another name, or ask to overwrite it.")
        if not (self.destination / HEADER_FILE).is_file():
            raise DestinationError(
                f"{self.destination} exists and is no bundle, so it is not overwritten; remove it first."
            )
        if strays := self._strays():
            raise DestinationError(f"{self.destination} also holds {strays[0]}, which is no part of the bundle, so it "
                                   "is not overwritten; move that elsewhere first.")

    def _strays(self) -> list[str]:
        """What lies in the bundle that would be overwritten and belongs to nobody's conversion."""
        try:
            rows = parse_json((self.destination / HEADER_FILE).read_bytes())["files"]
            own = {HEADER_FILE, WEIGHTS_FILE, *(row["name"] for row in rows)}
        except (OSError, ValueError, KeyError, TypeError):  # damaged: its files cannot be told from others
            own = set()
        return sorted(path.name for path in self.destination.iterdir()
                      if path.is_dir() or (own and path.name not in own and not path.name.startswith(".")))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say in one sentence why the destination cannot be written."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DestinationError(
                    f"The disk is full: {self.destination} could not be written; free some space and try again. "
                    "Nothing was left behind."
                ) from None
            raise DestinationError(f"Cannot write {self.destination}: {error.strerror or error}.") from None


def _chunks(path: Path) -> Iterator[bytes]:
    """A source file piece by piece; its own faults are told apart from those of the destination."""
    try:
        with open_plain(path) as file:
            while chunk := file.read(COPY_BYTES):
                yield chunk
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
