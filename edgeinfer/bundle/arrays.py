"""Files of named arrays: how optional parts of a bundle are stored. Specified in docs/reference/bundle.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.base.strict_json import parse_json
from edgeinfer.base.units import MAX_BYTES, round_up
from edgeinfer.errors import BundleError
from edgeinfer.quant import LINE_BYTES

from ..base.dataclass import dataclass
from .format import UnknownError
from .rows import exact_fields

ARRAYS_VERSION = 1
MAX_TABLE_BYTES = 16 << 20
MAX_DIMENSIONS = 8
"""No array of a model has more, and NumPy takes 32 or 64."""
KINDS = {"u8": "<u1", "u32": "<u4", "i32": "<i4", "i64": "<i8", "u64": "<u8", "f32": "<f4"}
"""Types of elements, and NumPy's names for them."""
_NAMES = {np.dtype(name): kind for kind, name in KINDS.items()}
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Later:
    """An array that is made when it is written, piece by piece: no more than one piece need be in memory."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.dtype.itemsize * prod(self.shape)


def pack_arrays(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any] | Later],
                align: int = LINE_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a file: length and text of its table, then the arrays at multiples of 64.

    The first one begins at a multiple of `align`.
    """
    rows: list[dict[str, Any]] = []
    at = 0
    for name, array in arrays.items():
        at = round_up(at, LINE_BYTES)
        rows.append({"name": name, "kind": _NAMES[array.dtype], "shape": list(array.shape), "offset": at})
        at += array.nbytes
    table = {"version": ARRAYS_VERSION, "about": dict(about), "arrays": rows}
    text = json.dumps(table).encode()
    text += b" " * (round_up(8 + len(text), align) - 8 - len(text))
    yield len(text).to_bytes(8, "little") + text
    at = 0
    for row, array in zip(rows, arrays.values(), strict=True):
        yield bytes(row["offset"] - at)
        for piece in array.pieces() if isinstance(array, Later) else (array,):
            yield np.ascontiguousarray(piece).tobytes()
        at = row["offset"] + array.nbytes


def open_arrays(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Return a file's header, and its arrays, mapped read-only.

    Raises
    ------
    BundleError
        It is no such file, from a newer version, or its table and its length do not fit together.
    """
    with os_errors(BundleError, f"{path.name}"), open_plain(path) as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > MAX_TABLE_BYTES or (8 + length) % LINE_BYTES:
            raise BundleError(f"{path.name} is not a file of arrays.")
        about, rows = _table(file.read(length), path.name)
        nbytes = file.seek(0, 2) - 8 - length
        data = np.memmap(file, np.uint8, "r", 8 + length, (nbytes,)) if nbytes > 0 else np.zeros(0, np.uint8)
    arrays: Arrays = {}
    end = 0
    for row in rows:
        kind, size = np.dtype(KINDS[row["kind"]]), prod(row["shape"])
        if row["name"] in arrays or row["offset"] != round_up(end, LINE_BYTES):
            raise BundleError(f"{path.name}: the array {row['name'][:60]!r} occurs twice, or not after the one before "
                              "it.")
        end = row["offset"] + size * kind.itemsize
        if end > nbytes:
            raise BundleError(f"{path.name} ends within the array {row['name'][:60]!r}.")
        arrays[row["name"]] = data[row["offset"] : end].view(kind).reshape(row["shape"])
    if end != nbytes:
        raise BundleError(f"{path.name} has {nbytes} bytes of arrays; its table lists {end}.")
    return about, arrays


def offsets(path: Path, arrays: Arrays) -> dict[str, int]:
    """Return where each array of an opened file begins in it."""
    with os_errors(BundleError, f"{path.name}"), open_plain(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    first = next(iter(arrays.values())).ctypes.data
    return {name: start + array.ctypes.data - first for name, array in arrays.items()}


def _table(text: bytes, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        table = parse_json(text, unique=True)
    except ValueError as error:
        raise BundleError(f"{name} has a table that is not valid JSON ({str(error)[:120]}).") from None
    if not isinstance(table, dict) or type(table.get("version")) is not int:
        raise BundleError(f"{name} is not a file of arrays.")
    if table["version"] > ARRAYS_VERSION:
        raise BundleError(f"{name} has version {table['version']}, made by a newer edgeinfer; upgrade edgeinfer.")
    try:
        exact_fields(table, ("version", "about", "arrays"), name)
        rows = table["arrays"]
        if not isinstance(rows, list) or not isinstance(table["about"], dict):
            raise BundleError(f"{name} is not a file of arrays.")
        for row in rows:
            if not isinstance(row, dict):
                raise BundleError(f"{name} lists an array that is not a JSON object.")
            exact_fields(row, ("name", "kind", "shape", "offset"), name)
            _check_row(row, name)
    except UnknownError as error:
        raise BundleError(f"{error}; upgrade edgeinfer, or make it again.") from None
    return table["about"], rows


def _check_row(row: dict[str, Any], name: str) -> None:
    shape = row["shape"]
    if type(row["name"]) is not str or row["kind"] not in tuple(KINDS) or type(row["offset"]) is not int:
        raise BundleError(f"{name} lists an array without a usable name, kind or offset.")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n > 0 for n in shape) \
            or prod(shape) > MAX_BYTES // 8:
        raise BundleError(f"{name}: the array {row['name'][:60]!r} has no usable shape.")
