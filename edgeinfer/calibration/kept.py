"""Statistics of inputs on disk: a file for each input, in a directory of the user's cache that is complete or absent.

Half of a covariance is stored, in blocks of rows. They are kept, so that a second conversion of the same model by the
same text, perhaps to other types, does without the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import open_arrays, pack_arrays
from edgeinfer.quant import InputStatistics

from ..base.atomic_write import Destination
from ..base.files import replacement
from ..errors import BundleError, DestinationError
from .effects import MEASURED, Effect
from .inputs import BLOCK, MatrixInput

INDEX_FILE, EFFECTS_FILE = "statistics.json", "effects.json"
VERSION = 3
Arrays = dict[str, NDArray]


class StatisticsWriter(Destination):
    """Writes the statistics of a model's inputs; a context manager that leaves all of them or nothing."""

    kind, mark, permission = "statistics of inputs", INDEX_FILE, "remove it"

    def __init__(self, path: Path):
        super().__init__(path, overwrite=True, waiting=lambda: None)
        self._files: dict[str, str] = {}

    def add(self, one: MatrixInput, statistics: Sequence[InputStatistics]) -> None:
        """Write the statistics of an input."""
        name = f"{len(set(self._files.values()))}.bin"
        arrays: Arrays = {"tokens": np.array([each.tokens for each in statistics], np.int64)}
        for i, each in enumerate(statistics):
            arrays |= {f"{i}.mean_square": each.mean_square}
            arrays |= {} if each.largest is None else {f"{i}.largest": each.largest}
            if each.covariance is not None:
                for start in range(0, one.width, BLOCK):
                    arrays[f"{i}.covariance.{start}"] = each.covariance[start : start + BLOCK, : start + BLOCK]
        with self.writing(), open(self.folder / name, "wb") as file:
            for part in pack_arrays({"part": "inputs"}, arrays):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        self._files |= dict.fromkeys(one.weights, name)

    def _objection(self) -> str | None:
        return None

    def _commit(self) -> None:
        text = json.dumps({"version": VERSION, "files": self._files})
        (self.folder / INDEX_FILE).write_text(text, encoding="utf-8")
        self._replace()


class KeptStatistics:
    """Statistics of a directory that `StatisticsWriter` has made.

    Raises
    ------
    BundleError
        It is not complete, or from another version.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            data = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} has no statistics of inputs ({error}).") from None
        if data.get("version") != VERSION:
            raise BundleError(f"{path} has statistics of inputs of version {data.get('version')}, not {VERSION}.")
        self._files: dict[str, str] = data["files"]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights whose inputs are known."""
        return tuple(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return sum(path.stat().st_size for path in self.path.iterdir())

    @property
    def effects(self) -> dict[str, Effect] | None:
        """Effects of the errors of weights, by name; None if they were not measured, or not as today."""
        try:
            found = json.loads((self.path / EFFECTS_FILE).read_text(encoding="utf-8"))
            if found["measured"] != MEASURED:
                return None
            return {name: Effect(*map(float, each)) for name, each in found["effects"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # they are measured again

    def keep_effects(self, effects: Mapping[str, Effect]) -> None:
        """Keep effects beside the statistics."""
        try:
            with replacement(self.path / EFFECTS_FILE) as file:
                file.write(json.dumps({"measured": MEASURED, "effects": effects}).encode())
        except OSError as error:
            raise DestinationError(f"{self.path} could not be written ({error.strerror or error}); free some space and "
                                   "convert again: its statistics are kept.") from None

    def of(self, weight: str) -> Pieces | None:
        """Return the statistics of a weight's input, per expert or head, or None."""
        return Pieces(self.path / self._files[weight]) if weight in self._files else None


class Pieces(Sequence[InputStatistics]):
    """Statistics of the pieces of an input, read one at a time."""

    def __init__(self, path: Path):
        _, self._arrays = open_arrays(path)
        self.tokens: list[int] = self._arrays["tokens"].tolist()
        self.width = len(self._arrays["0.mean_square"])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        if not 0 <= i < len(self):
            raise IndexError(i)
        squares = np.array(self._arrays[f"{i}.mean_square"])
        largest = self._arrays.get(f"{i}.largest")
        covariance = None
        if f"{i}.covariance.0" in self._arrays:
            width = len(squares)
            covariance = np.empty((width, width), np.float32)
            for start in range(0, width, BLOCK):
                stop, block = min(start + BLOCK, width), self._arrays[f"{i}.covariance.{start}"]
                covariance[start:stop, :stop] = block
                covariance[:start, start:stop] = block[:, :start].T
        return InputStatistics(self.tokens[i], squares, None if largest is None else np.array(largest),
                               covariance)
