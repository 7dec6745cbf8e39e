"""Write a bundle: streaming, into a hidden directory beside the destination that is renamed when it is complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edgeinfer import __version__
from edgeinfer.base.atomic_write import Destination
from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import BundleError, CheckpointError
from edgeinfer.graph import ModelConfig
from edgeinfer.quant import WeightType

from .format import PARTS, WEIGHTS_FILE, FileEntry, Header, Quantisation, TensorEntry, TensorLayout, end_of_file
from .header import HEADER_FILE, header_from_json, header_to_json
from .write_back import WriteBack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Data = bytes | bytearray | memoryview | NDArray[np.uint8]

COPY_BYTES = 8 << 20


class BundleWriter(Destination):
    """A bundle in the making; a context manager that either leaves a complete bundle or nothing.

    Parameters
    ----------
    destination : str or Path
        Directory to make; it must not exist unless `overwrite`.
    config : ModelConfig
    quantisation : Quantisation
    overwrite : bool
        Replace an existing bundle (never a directory that is not a bundle).
    source : str
        Where the weights came from, for people.
    waiting : callable, optional
        Called twice a second while another process writes the destination; without it that is refused.

    Raises
    ------
    DestinationError
        On entering: if the destination exists or another process writes it. Later: if the disk is full.
    """

    kind, mark, permission = "a bundle", HEADER_FILE, "overwrite it (--overwrite)"

    def __init__(self, destination: str | Path, config: ModelConfig, quantisation: Quantisation, *,
                 overwrite: bool = False, source: str = "", waiting: Callable[[], object] | None = None):
        super().__init__(destination, overwrite, waiting)
        self._config = config
        self.quantisation = quantisation
        """The types that were requested, as the header says, which is written last."""
        self._source = source
        self._file: BinaryIO | None = None
        self._write_back: WriteBack | None = None
        self._layout = TensorLayout()
        self._tensors: list[TensorEntry] = []
        self._files: dict[str, FileEntry] = {}

    def _begin(self) -> None:
        self._file = open(self.folder / WEIGHTS_FILE, "wb")  # noqa: SIM115
        self._write_back = WriteBack(self._file)

    def add(
        self, name: str, weight_type: WeightType, shape: tuple[int, ...], data: Data | Iterable[Data],
        pieces: int = 0, stride: int = 0,
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
        pieces, stride : int
            Where it shares an allocation with the tensors in front or after: pieces, and bytes from one to the next
            (`Graph.strides`). The first leaves gaps, which the others fill.

        Returns
        -------
        TensorEntry
        """
        nbytes, before = weight_type.nbytes(shape), self._layout.end
        try:
            offset = self._layout.add(nbytes, pieces, stride)
        except BundleError as error:
            raise BundleError(f"tensor {name!r} {error}.") from None
        entry = TensorEntry(name, weight_type, tuple(shape), offset, nbytes, "", pieces, stride)
        digest, written = hashlib.sha256(), 0
        chunks = [data] if isinstance(data, bytes | bytearray | memoryview) or hasattr(data, "dtype") else data
        if offset > before:
            with self.writing():
                self._weights.seek(before)
                self._weights.write(bytes(offset - before))
        for chunk in chunks:
            view = memoryview(chunk).cast("B")  # type: ignore[arg-type]
            digest.update(view)
            with self.writing():
                self._write(entry, written, view)
            written += len(view)
        if written != nbytes:
            raise BundleError(f"tensor {name!r} was given {written} bytes; its shape and type need {nbytes}.")
        self._tensors.append(replace(entry, sha256=digest.hexdigest()))
        return self._tensors[-1]

    def _write(self, entry: TensorEntry, at: int, data: memoryview) -> None:
        """Write some of a tensor's bytes, from byte `at` of it on, to the pieces that they belong to."""
        own = entry.piece_bytes
        while data:
            piece, within = divmod(at, own) if entry.pieces else (0, at)
            here = data[: own - within] if entry.pieces else data
            self._weights.seek(entry.offset + piece * entry.stride + within)
            self._weights.write(here)
            if self._write_back:
                self._write_back.wrote(len(here))
            data, at = data[len(here) :], at + len(here)

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

        with self.writing():
            self._weights.flush()
        if entry.pieces:
            raise BundleError(f"tensor {entry.name!r} is in {entry.pieces} pieces, which are not mapped as one.")
        return np.memmap(self.folder / WEIGHTS_FILE, np.uint8, "r", entry.offset, (entry.nbytes,))

    @property
    def _weights(self) -> BinaryIO:
        if self._file is None:
            raise BundleError(f"the bundle {self.path} is not open for writing.")
        return self._file

    def _add_file(self, name: str, chunks: Iterable[bytes], part: str) -> FileEntry:
        if part and part not in PARTS:
            raise BundleError(f"{part!r} is not part of a model; the parts are {', '.join(PARTS)}.")
        if Path(name).name != name or name in self._files or name in (WEIGHTS_FILE, HEADER_FILE):
            raise BundleError(f"{name!r} cannot be the name of a further file in the bundle.")
        digest, nbytes = hashlib.sha256(), 0
        with self.writing(), open(self.folder / name, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                nbytes += len(chunk)
            _sync(file)
        entry = self._files[name] = FileEntry(name, nbytes, digest.hexdigest(), part)
        return entry

    def _commit(self) -> None:
        end = end_of_file(self._layout.end)
        self._weights.seek(self._layout.end)
        self._weights.write(bytes(end - self._layout.end))
        if self._write_back:
            self._write_back.wait()
        _sync(self._weights)
        self._weights.close()
        header = Header(self._config, self.quantisation, tuple(self._tensors), tuple(self._files.values()), end,
                        self._source, f"edgeinfer {__version__}")
        text = header_to_json(header)
        header_from_json(text)  # this version must be able to read its own header
        with open(self.folder / HEADER_FILE, "wb") as file:
            file.write(text)
            _sync(file)
        self._replace()

    def _abandon(self) -> None:
        if self._write_back is not None:
            self._write_back.close()
            self._write_back = None
        if self._file is not None:
            with suppress(OSError):  # a full disk refuses the buffered rest, which is no longer needed
                self._file.close()
            self._file = None
        super()._abandon()

    def _objection(self) -> str | None:
        if not (self.path / HEADER_FILE).is_file():
            return "exists and is not a bundle, so it is not overwritten; remove it first."
        if strays := self._strays():
            return (f"also holds {strays[0]}, which is not part of the bundle, so it is not overwritten; move that "
                    "elsewhere first.")
        return None

    def _strays(self) -> list[str]:
        """Return the files in the bundle's directory that would be overwritten and that no conversion wrote."""
        try:
            rows = parse_json((self.path / HEADER_FILE).read_bytes())["files"]
            own = {HEADER_FILE, WEIGHTS_FILE, *(row["name"] for row in rows)}
        except (OSError, ValueError, KeyError, TypeError):  # damaged: its files cannot be told from others
            own = set()
        return sorted(path.name for path in self.path.iterdir()
                      if path.is_dir() or (own and path.name not in own and not path.name.startswith(".")))


def _chunks(path: Path) -> Iterator[bytes]:
    """Read a source file piece by piece; its errors are distinguished from those of the destination."""
    with os_errors(CheckpointError, f"Cannot read {path}"), open_plain(path) as file:
        while chunk := file.read(COPY_BYTES):
            yield chunk


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
