"""The tensors of one GGUF file: read as float32, or as blocks; with plain reads, as those of safetensors files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.errors import CheckpointError

from ..checkpoint.safetensors_file import SourceTensor
from .header import GgufHeader
from .types import BY_NAME
from .values import dequantise


class GgufFile:
    """One open file whose header was read, like `SafetensorsFile` for safetensors.

    Raises
    ------
    CheckpointError
        It cannot be opened, or its tensors overlap or leave it (with `data`).
    """

    def __init__(self, header: GgufHeader, data: bool = True):
        if data:
            header.check_data()
        self._size, self._turn = header.size, threading.Lock()
        self.path: Path = header.path
        self.tensors = {name: SourceTensor(tensor.kind.name, tensor.shape, header.data + tensor.offset, tensor.nbytes)
                        for name, tensor in header.tensors.items()}
        self.aliases: dict[str, str] = {}
        with os_errors(CheckpointError, f"Cannot read {self.path}"):
            self._file: BinaryIO = open_plain(self.path)  # of which several threads read

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def has(self, name: str) -> bool:
        """Return whether the file is long enough to hold the whole tensor."""
        return self.tensors[name].offset + self.tensors[name].nbytes <= self._size

    def read(self, name: str, starts: Sequence[int], count: int) -> NDArray[np.float32]:
        """Read `count` elements from each of the elements `starts` on, as float32 of shape (len(starts), count).

        All begin at the same offset of a block, as parts of rows do.
        """
        kind = BY_NAME[self.tensors[name].dtype]
        skipped = starts[0] % kind.elements if starts else 0
        n_blocks = -(-(skipped + count) // kind.elements)
        raw = np.empty((len(starts), n_blocks * kind.nbytes), np.uint8)
        for start, piece in zip(starts, raw, strict=True):
            self._read_into(name, start // kind.elements * kind.nbytes, piece)
        values = dequantise(raw.reshape(-1, kind.nbytes if kind.elements > 1 else n_blocks * kind.nbytes), kind.name)
        return values.reshape(len(starts), -1)[:, skipped : skipped + count]

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start to stop of a tensor in the file's own form, (rows, bytes of a row)."""
        tensor = self.tensors[name]
        row_bytes = tensor.nbytes // prod(tensor.shape[:-1])
        raw = np.empty((stop - start, row_bytes), np.uint8)
        self._read_into(name, start * row_bytes, raw.reshape(-1))
        return raw

    def _read_into(self, name: str, at: int, raw: NDArray[Any]) -> None:
        with os_errors(CheckpointError, f"Cannot read {self.path}"), self._turn:
            self._file.seek(self.tensors[name].offset + at)
            count = self._file.readinto(raw.data)  # type: ignore[attr-defined]
        if count != raw.nbytes:
            raise CheckpointError(f"{self.path} became shorter while it was read; the tensor {name} is incomplete.")
