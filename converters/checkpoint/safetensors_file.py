"""Read a safetensors file without trusting it: bounded header, exact offsets, elements straight to float32.

Format: 8 bytes header length (little endian), JSON header, then the tensors' bytes one after another
(https://github.com/huggingface/safetensors, README, section Format). Elements are read with plain file reads:
pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
MAX_ELEMENTS = 2**48
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}
WEIGHT_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types that a weight may have, and the NumPy type that its bytes are read as."""


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte, counted from the beginning of the file."""
    nbytes: int


class SafetensorsFile:
    """One open safetensors file, its header checked.

    Attributes
    ----------
    path : Path
    tensors : dict of str to SourceTensor
    aliases : dict of str to str
        The header's metadata, where a name of a tensor may lead to that of another one, which has its elements.

    Raises
    ------
    CheckpointError
        If the file is truncated, or its header is not a header or is about types, shapes or offsets.
    """

    def __init__(self, path: Path):
        self.path, self._turn = path, threading.Lock()
        with os_errors(CheckpointError, f"Cannot read {path}"):
            self._file: BinaryIO = open_plain(path)
        try:
            self.tensors = self._read_header()
        except OSError as error:  # of a disk that fails
            self._file.close()
            raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from None
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, name: str, starts: Sequence[int], count: int) -> NDArray[np.float32]:
        """Read `count` elements from each of the elements `starts` on, as float32 of shape (len(starts), count)."""
        tensor, item = self.tensors[name], self._item_bytes(name)
        raw = np.empty((len(starts), count), WEIGHT_DTYPES[tensor.dtype])
        for start, piece in zip(starts, raw, strict=True):
            self._read_into(name, tensor.offset + start * item, piece)
        return self._as_float32(tensor, raw)

    def read_rows_as(self, name: str, start: int, stop: int, dtype: str, axes: int = 1) -> NDArray[Any]:
        """Rows start to stop of a tensor as elements of a NumPy type of the stored size, of one dimension.

        Rows are counted over this many leading axes. A number without dimensions is a row.
        """
        tensor = self.tensors[name]
        row_bytes = tensor.nbytes // prod(tensor.shape[:axes])
        raw = np.empty((stop - start) * row_bytes, np.uint8)
        self._read_into(name, tensor.offset + start * row_bytes, raw)
        return raw.view(dtype)

    def _item_bytes(self, name: str) -> int:
        """Bytes of an element of a tensor that holds weights."""
        dtype = self.tensors[name].dtype
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"The tensor {name} in {self.path} has the type {dtype}; weights must be F32, F16, BF16 or F64."
            )
        return ITEM_BYTES[dtype]

    def _read_into(self, name: str, offset: int, raw: NDArray[Any]) -> None:
        """Fill an array from an offset of the file on."""
        with os_errors(CheckpointError, f"Cannot read {self.path}"), self._turn:
            self._file.seek(offset)
            count = self._file.readinto(raw.view(np.uint8).data)  # type: ignore[attr-defined]
        if count != raw.nbytes:
            raise CheckpointError(f"{self.path} became shorter while it was read; the tensor {name} is incomplete.")

    @staticmethod
    def _as_float32(tensor: SourceTensor, raw: NDArray[Any]) -> NDArray[np.float32]:
        if tensor.dtype == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore"):  # a double beyond float32 becomes infinite and is refused as such
            return raw.astype(np.float32, copy=False)

    def _read_header(self) -> dict[str, SourceTensor]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise self._bad(f"its header should have {length} bytes, but the file has {size}; it is truncated or no "
                            "safetensors file")
        try:
            data = parse_json(self._file.read(length))
        except ValueError:
            raise self._bad("its header is not valid JSON") from None
        if not isinstance(data, dict):
            raise self._bad("its header is not a JSON object")
        self.aliases = self._metadata(data.pop("__metadata__", None))
        tensors = {name: self._tensor(name, entry, 8 + length) for name, entry in data.items()}
        self._check_offsets(tensors, 8 + length, size)
        return tensors

    def _metadata(self, found: Any) -> dict[str, str]:
        """Return the texts by name, as the format requires; anything else is not safetensors."""
        if found is None:
            return {}
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise self._bad("its __metadata__ is not a table of texts")
        return found

    def _tensor(self, name: str, entry: Any, base: int) -> SourceTensor:
        """One header entry with its size checked against type and shape."""
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
        except (TypeError, KeyError, ValueError):
            raise self._bad(f"the entry of tensor {name!r:.80} lacks dtype, shape or data_offsets") from None
        if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS * 8 for n in numbers):
            raise self._bad(f"the shape or offsets of tensor {name!r:.80} are not sizes")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._bad(f"the tensor {name!r:.80} has the unknown type {dtype!r:.40}")
        if prod(shape) > MAX_ELEMENTS:
            raise self._bad(f"the shape {shape} of tensor {name!r:.80} is too large")
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        if end - begin != nbytes:
            raise self._bad(
                f"the tensor {name!r:.80} has {end - begin} bytes, but its shape {shape} and type {dtype} need {nbytes}"
            )
        return SourceTensor(dtype, tuple(shape), base + begin, nbytes)

    def _check_offsets(self, tensors: dict[str, SourceTensor], base: int, size: int) -> None:
        """The tensors fill the rest of the file exactly, without holes and overlaps."""
        end = base
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset != end:
                kind = "overlaps another one" if tensor.offset < end else "follows a hole"
                raise self._bad(f"the tensor {name!r:.80} {kind} at byte {tensor.offset - base} of the data")
            end = tensor.offset + tensor.nbytes
        if end > size:
            raise self._bad(f"it is truncated: {size} bytes instead of {end}; download it again")
        if end < size:
            raise self._bad(f"{size - end} bytes after the last tensor belong to nothing")

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"Cannot read {self.path}: {what}.")
