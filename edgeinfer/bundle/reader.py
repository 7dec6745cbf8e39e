"""Open a bundle: check its table, map its weights, never copy them."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.errors import BundleError
from edgeinfer.graph import ModelConfig
from edgeinfer.quant import WeightType

from .format import WEIGHTS_FILE, FileEntry, Header, Quantisation, TensorEntry
from .header import HEADER_FILE, MAX_HEADER_BYTES, header_from_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_BYTES = 8 << 20
Progress = Callable[[int, int, str], None]


def is_bundle(path: str | Path) -> bool:
    """Whether the directory looks like a bundle (it has a bundle.json); nothing is checked."""
    return (Path(path) / HEADER_FILE).is_file()


class Bundle:
    """An open bundle; use `Bundle.open`. A context manager.

    Attributes
    ----------
    path : Path
        The bundle's directory.
    header : Header
        The content of bundle.json.
    tensors : dict of str to TensorEntry
    types : dict of str to WeightType
        Storage of each tensor, for `build_graph(bundle.config, expected_types(bundle.types))`.
    files : dict of str to FileEntry
        Files beside the weights (tokenizer and the like).
    weights : uint8 array of shape (weights_bytes,)
        weights.bin, mapped read-only. The mapping lives as long as any view of it.
    """

    def __init__(self, path: Path, header: Header, weights: NDArray[np.uint8]):
        self.path = path
        self.header = header
        self.tensors = {entry.name: entry for entry in header.tensors}
        self.types = {entry.name: entry.type for entry in header.tensors}
        self.files = {entry.name: entry for entry in header.files}
        self._weights: NDArray[np.uint8] | None = weights

    @classmethod
    def open(cls, path: str | Path, expected: Mapping[str, tuple[int, ...]] | None = None) -> Bundle:
        """Check the header against the files and map the weights. Checksums of weights are left to `verify`.

        Parameters
        ----------
        path : str or Path
            The bundle's directory.
        expected : mapping of str to tuple of int, optional
            Names and shapes that the tensor table must have, no more and no less; see also `check`.

        Raises
        ------
        BundleError
            One sentence that names the bundle and what is wrong with it.
        """
        path = Path(path)
        try:
            header = header_from_json(_read_header(path))
            for entry in header.files:
                _check_length(path, entry.name, entry.nbytes)
            _check_length(path, WEIGHTS_FILE, header.weights_bytes)
            bundle = cls(path, header, _map(path / WEIGHTS_FILE))
            if expected is not None:
                bundle._check(expected)
        except BundleError as error:
            raise BundleError(f"Cannot open the bundle {path}: {error}") from None
        except OSError as error:
            raise BundleError(f"Cannot open the bundle {path}: {error.strerror or error}.") from None
        return bundle

    @property
    def config(self) -> ModelConfig:
        """The model that the weights belong to."""
        return self.header.config

    @property
    def quantisation(self) -> Quantisation:
        """The storage that was asked for when the bundle was made."""
        return self.header.quantisation

    @property
    def weights_path(self) -> Path:
        """The file that holds all weights."""
        return self.path / WEIGHTS_FILE

    @property
    def weights_bytes(self) -> int:
        """Length of weights.bin in bytes."""
        return self.header.weights_bytes

    @property
    def weights(self) -> NDArray[np.uint8]:
        """weights.bin, mapped read-only, as uint8 of shape (weights_bytes,)."""
        if self._weights is None:
            raise BundleError(f"The bundle {self.path} was closed.")
        return self._weights

    def weight_type(self, name: str) -> WeightType:
        """Storage of a tensor that the graph asks for; a BundleError says so if the table lacks it."""
        return self._entry(name).type

    def file(self, name: str) -> Path | None:
        """Path of a listed file such as tokenizer.json, or None where the bundle has none of that name."""
        return self.path / name if name in self.files else None

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a bundle whose tensors are not exactly the expected names with the expected shapes.

        Parameters
        ----------
        expected : mapping of str to tuple of int
            For a graph: ``{w.name: w.shape for w in graph.weights}``.
        """
        try:
            self._check(expected)
        except BundleError as error:
            raise BundleError(f"Cannot use the bundle {self.path}: {error}") from None

    def verify(self, progress: Progress | None = None) -> None:
        """Read everything and compare every checksum; gaps between tensors must be zero.

        Parameters
        ----------
        progress : callable, optional
            Called with (done_bytes, total_bytes, name) while reading.

        Raises
        ------
        BundleError
            Naming the first tensor or file that was altered.
        """
        total = self.weights_bytes + sum(entry.nbytes for entry in self.files.values())
        done = 0
        end = 0
        for entry in self.header.tensors:
            self._check_gap(end, entry.offset)
            end = entry.offset + entry.nbytes
            digest = hashlib.sha256()
            for start in range(entry.offset, end, CHUNK_BYTES):
                digest.update(self.weights[start : min(start + CHUNK_BYTES, end)].data)
                if progress:
                    progress(done + min(start + CHUNK_BYTES, end), total, entry.name)
            if digest.hexdigest() != entry.sha256:
                raise BundleError(
                    f"Tensor {entry.name!r} of the bundle {self.path} is damaged: its checksum does not match."
                )
        self._check_gap(end, self.weights_bytes)
        done = self.weights_bytes
        for item in self.files.values():
            self._verify_file(item)
            done += item.nbytes
            if progress:
                progress(done, total, item.name)

    def close(self) -> None:
        """Let go of the mapping; it ends when the last view of it is gone."""
        self._weights = None

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _entry(self, name: str) -> TensorEntry:
        entry = self.tensors.get(name)
        if entry is None:
            raise BundleError(f"The bundle {self.path} lacks the tensor {name!r}.")
        return entry

    def _check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        if missing := [name for name in expected if name not in self.tensors]:
            raise BundleError(f"the tensor {missing[0]!r} is missing.")
        if extra := [name for name in self.tensors if name not in expected]:
            raise BundleError(f"the tensor {extra[0]!r} belongs to no part of a {self.config.model_type} model.")
        for name, shape in expected.items():
            if self.tensors[name].shape != tuple(shape):
                have = list(self.tensors[name].shape)
                raise BundleError(f"the tensor {name!r} has shape {have}; the model needs {list(shape)}.")

    def _check_gap(self, start: int, end: int) -> None:
        if self.weights[start:end].any():
            raise BundleError(
                f"The bundle {self.path} is damaged: the gap at byte {start} of {WEIGHTS_FILE} is not zero."
            )

    def _verify_file(self, entry: FileEntry) -> None:
        digest = hashlib.sha256()
        try:
            with open(self.path / entry.name, "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise BundleError(f"Cannot read {self.path / entry.name}: {error.strerror or error}.") from None
        if digest.hexdigest() != entry.sha256:
            raise BundleError(f"File {entry.name!r} of the bundle {self.path} is damaged: its checksum does not match.")


def _read_header(path: Path) -> bytes:
    if not path.is_dir():
        raise BundleError("there is no such directory." if not path.exists() else "it is no directory.")
    header = path / HEADER_FILE
    if not header.is_file():
        raise BundleError(f"it has no {HEADER_FILE}.")
    with open(header, "rb") as file:
        return file.read(MAX_HEADER_BYTES + 1)


def _check_length(path: Path, name: str, nbytes: int) -> None:
    file = path / name
    if not file.is_file():
        raise BundleError(f"its file {name} is missing.")
    size = file.stat().st_size
    if size != nbytes:
        how = "truncated" if size < nbytes else "too long"
        raise BundleError(f"{name} is {how}: {size} bytes instead of {nbytes}.")


def _map(path: Path) -> NDArray[np.uint8]:
    import numpy as np

    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8)
