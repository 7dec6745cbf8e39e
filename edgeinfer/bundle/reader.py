"""Open a bundle: check its table, map its weights, never copy them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.errors import BundleError
from edgeinfer.graph import Graph, ModelConfig
from edgeinfer.quant import WeightType

from ..base.progress import OnStageProgress
from .checksums import Passed, Piece, compare
from .files import check_parts, map_weights_file, read_header, state_of, weights_pieces
from .format import APPROXIMATING, WEIGHTS_FILE, Header, Quantisation, TensorEntry
from .header import check_tensors, header_from_json
from .mapping import MappedFile
from .orders import check_orders

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TELL_SECONDS = 1.0
"""Duration from which a check on opening is announced."""


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
    identity : str
        Checksum of bundle.json as it was read, which has those of everything else: whatever is put in the bundle's
        place later has another.
    """

    def __init__(self, path: Path, header: Header, weights: MappedFile, identity: str = "",
                 states: Mapping[str, os.stat_result] | None = None):
        self.path = path
        self.header = header
        self.identity = identity
        self._states = dict(states or {})
        self.tensors = {entry.name: entry for entry in header.tensors}
        self.types = {entry.name: entry.type for entry in header.tensors}
        self.files = {entry.name: entry for entry in header.files}
        self._weights: MappedFile | None = weights

    @classmethod
    def open(cls, path: str | Path, expected: Mapping[str, tuple[int, ...]] | None = None, compare: bool = True
             ) -> Bundle:
        """Check the header and the small files, and map the weights, which `check_contents` compares.

        Parameters
        ----------
        path : str or Path
            The bundle's directory.
        expected : mapping of str to tuple of int, optional
            Names and shapes that the tensor table must have, no more and no less; see also `check`.
        compare : bool
            Whether the small files are compared with their checksums; not needed to read only the header.

        Raises
        ------
        BundleError
            One sentence that names the bundle and its error.
        """
        path = Path(path)
        try:
            text = read_header(path)
            header = header_from_json(text)
            states = {entry.name: state_of(path, entry) for entry in header.files}
            weights = map_weights_file(path, header)
            states[WEIGHTS_FILE] = weights.status
            bundle = cls(path, header, weights, hashlib.sha256(text).hexdigest(), states)
            if compare:
                bundle._once(bundle._names(parts=False), lambda: list(bundle._files(parts=False)))
            if expected is not None:
                check_tensors(header, expected)
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
        """The storage that was requested when the bundle was made."""
        return self.header.quantisation

    @property
    def weights_path(self) -> Path:
        """The file that holds all weights."""
        return self.path / WEIGHTS_FILE

    @property
    def weights_state(self) -> os.stat_result:
        """Return the file status of weights.bin when it was mapped."""
        return self._states[WEIGHTS_FILE]

    def state(self, name: str) -> os.stat_result:
        """Return the file status of a listed file when the bundle was opened."""
        return self._states[name]

    @property
    def weights_bytes(self) -> int:
        """Length of weights.bin in bytes."""
        return self.header.weights_bytes

    @property
    def weights(self) -> NDArray[np.uint8]:
        """weights.bin, mapped read-only, as uint8 of shape (weights_bytes,)."""
        if self._weights is None:
            raise BundleError(f"The bundle {self.path} was closed.")
        return self._weights.array

    def weight_type(self, name: str) -> WeightType:
        """Return the storage of a tensor that the graph needs; raises `BundleError` if the table lacks it."""
        return self._entry(name).type

    def stored(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Return the bytes of a tensor, in order, as they are in the mapping: in one piece, or in several."""
        entry = self._entry(name)
        return (self.weights[at : at + entry.piece_bytes] for at in entry.piece_offsets)

    def file(self, name: str) -> Path | None:
        """Return the path of a listed file such as tokenizer.json, or None."""
        return self.path / name if name in self.files else None

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a bundle whose tensors are not exactly the expected names with the expected shapes.

        Parameters
        ----------
        expected : mapping of str to tuple of int
        """
        with self._using():
            check_tensors(self.header, expected)

    def check_graph(self, graph: Graph) -> None:
        """Refuse a bundle whose tensors are not exactly a graph's weights, or do not share allocations as these do."""
        strides = graph.strides
        with self._using():
            check_tensors(self.header, {one.name: one.shape for one in graph.weights if one.kind != "predictor"})
            shared = [(entry.name, entry.pieces, entry.stride) for entry in self.header.tensors if entry.pieces]
            if shared != [(weight.name, weight.pieces, strides[weight.name]) for weight in graph.weights
                          if weight.pieces]:
                raise BundleError("the tensors that share an allocation are not those of a "
                                  f"{self.config.model_type} model, or are in another order; convert the model again.")

    def check_contents(self, threads: int | None = None, progress: OnStageProgress | None = None,
                       cold: bool = False) -> None:
        """Compare the checksums of the weights, once per state of their file, which the user's cache remembers.

        Parameters
        ----------
        threads : int, optional
            By default those that this process may use.
        progress : callable, optional
            Called with (bytes done, bytes in all, file name) if it takes more than a second.
        cold : bool
            Whether neurons will be read from a file of their own, which is left alone otherwise.

        Raises
        ------
        BundleError
            Naming the damaged part.
        """
        began = time.monotonic()

        def tell(done: int, total: int, name: str) -> None:
            if progress and time.monotonic() - began > TELL_SECONDS:
                progress(done, total, name)

        with self._using():
            check_orders(self.header.tensors, self.weights)
            self._once((WEIGHTS_FILE, *self._names(parts=True)),
                       lambda: [*weights_pieces(self.path, self.header), *self._files(parts=True)], threads, tell)
            if cold:
                self._once(self._names(cold=True), lambda: list(self._files(cold=True)), threads, tell)
        check_parts(self)

    def verify(self, progress: OnStageProgress | None = None) -> None:
        """Read everything and compare every checksum; gaps between tensors must be zero.

        Parameters
        ----------
        progress : callable, optional
            Called with (bytes done, bytes in all, file name) while reading.

        Raises
        ------
        BundleError
            Naming a tensor or file that was altered.
        """
        pieces = [*weights_pieces(self.path, self.header), *self._files(), *self._files(parts=True)]
        cold = list(self._files(cold=True))
        total = sum(piece.nbytes for piece in (*pieces, *cold))

        def offset_progress(before: int) -> OnStageProgress | None:
            return progress and (lambda done, _, name: progress(before + done, total, name))

        with self._using():
            compare(pieces, progress=offset_progress(0))
            check_orders(self.header.tensors, self.weights)
            check_parts(self, clusters=True)  # which names the neurons that were altered
            if cold:
                compare(cold, progress=offset_progress(sum(piece.nbytes for piece in pieces)))

    @property
    def parts(self) -> frozenset[str]:
        """Names of the optional parts that it has."""
        return frozenset(entry.part for entry in self.header.files if entry.part)

    @property
    def approximates(self) -> bool:
        """True if it has parts that a run may approximate with."""
        return not self.parts.isdisjoint(APPROXIMATING)

    def close(self) -> None:
        """Release the mapping; it ends with its last view."""
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

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Name the bundle in errors about it."""
        try:
            yield
        except BundleError as error:
            raise BundleError(f"Cannot use the bundle {self.path}: {error}") from None

    def _once(self, names: tuple[str, ...], pieces: Callable[[], list[Piece]], threads: int | None = None,
              progress: OnStageProgress | None = None) -> None:
        """Compare the pieces of these files unless they passed in this state."""
        passed = Passed(self.identity, [self._states[name] for name in names])
        if names and not passed:
            compare(pieces(), threads, progress)
            passed.remember()

    def _names(self, parts: bool = False, cold: bool = False) -> tuple[str, ...]:
        """The files beside the weights: parts of the model, which may be large, or `cold` neurons, or the others."""
        return tuple(entry.name for entry in self.header.files
                     if (entry.part == "cold" if cold else bool(entry.part) == parts and entry.part != "cold"))

    def _files(self, parts: bool = False, cold: bool = False) -> Iterator[Piece]:
        for name in self._names(parts, cold):
            entry = self.files[name]
            yield Piece(self.path / name, f"file {name!r}", entry.nbytes, entry.sha256)


