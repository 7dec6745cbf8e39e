"""A tensor that a checkpoint stores as codes, scales and more: read as float32, or as codes with their factors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import CheckpointError

from ..checkpoint.safetensors_file import SafetensorsFile, SourceTensor
from .bits import E4M3
from .kinds import PackedKind

Floats = NDArray[np.float32]
Codes = NDArray[Any]
"""int8 or uint8 of shape (rows, columns)."""
RECENT = 3
"""Tensors whose factors, or codes, are cached: gate and up are read alternately."""


@dataclass
class Block:
    """Rows of a tensor: weight = (code - zero point) x scale + minimum, by row and group of columns."""

    codes: Codes
    scales: Floats
    """(rows, groups)."""
    zeros: NDArray[np.uint8] | None = None
    minima: Floats | None = None
    group_of: NDArray[np.intp] | None = None
    """Group of each column; None if groups are runs of columns."""
    group_size: int = 0
    """Columns of a group; 0 for all of them."""
    levels: Floats | None = None
    """Values of the codes, if they are not the codes themselves."""

    def values(self) -> Floats:
        """The weights: the specification of all packings. Products and sums are rounded to float32, each once."""
        levels = self.codes if self.levels is None else self.levels[self.codes]
        values = np.subtract(levels, 0 if self.zeros is None else self._spread(self.zeros), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses values that become too large
            values *= self._spread(self.scales)
            if self.minima is not None:
                values += self._spread(self.minima)
        return values

    def _spread(self, factors: NDArray[Any]) -> NDArray[Any]:
        """One of each group for each column."""
        if self.group_of is not None:
            return factors[:, self.group_of]
        columns = self.codes.shape[1]
        return np.repeat(factors, self.group_size or columns, axis=1)[:, :columns]


@dataclass
class Loaded:
    """Data of a tensor that are kept while its rows are read."""

    codes: Callable[[int, int], Codes]
    """Codes of rows."""
    scales: Floats
    """(rows, groups), or a row for each block of rows."""
    zeros: NDArray[np.uint8] | None = None
    minima: Floats | None = None
    group_of: NDArray[np.intp] | None = None
    levels: Floats | None = None


class Recent:
    """The tensors that were loaded last, for all threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Loaded] = OrderedDict()
        self._turn = threading.Lock()

    def get(self, name: str, load: Callable[[], Loaded]) -> Loaded:
        """Return one of them, loading it if necessary."""
        with self._turn:
            if name not in self._kept:
                while len(self._kept) >= RECENT:
                    self._kept.popitem(last=False)
                self._kept[name] = load()
            self._kept.move_to_end(name)
            return self._kept[name]


class Parts:
    """The stored tensors of which one is made, by their names in it.

    Parameters
    ----------
    name : str
        Of the module, for messages.
    found : mapping
        File and name of each part, such as ``qweight``.
    """

    def __init__(self, name: str, found: Mapping[str, tuple[SafetensorsFile, str]]):
        self.name = name
        self._found = found

    def __contains__(self, part: str) -> bool:
        return part in self._found

    def stored(self, part: str) -> SourceTensor:
        """Type and shape of a part."""
        file, name = self._found[part]
        return file.tensors[name]

    @property
    def path(self) -> Path:
        """A file in which one of them is."""
        return next(iter(self._found.values()))[0].path

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.stored(part).nbytes for part in self._found)

    @property
    def names(self) -> set[str]:
        """Names of the parts in the checkpoint."""
        return {name for _, name in self._found.values()}

    def close(self) -> None:
        """Close their files."""
        for file, _ in self._found.values():
            file.close()

    def check(self, part: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> tuple[int, ...]:
        """The shape of a part that must be there; None in `shape` stands for any size.

        Raises
        ------
        CheckpointError
            It is missing, or has another type or shape.
        """
        if part not in self._found:
            raise CheckpointError(f"The quantised module {self.name:.100} has no {part} in {self.path.parent}; "
                                  "download the checkpoint again.")
        have, (file, name) = self.stored(part), self._found[part]
        if have.dtype not in dtypes:
            raise CheckpointError(f"The tensor {name:.100} in {file.path} has the type {have.dtype}; it must be "
                                  f"{' or '.join(dtypes)}.")
        fits = len(have.shape) == len(shape) and 0 not in have.shape
        if not fits or any(want not in (None, n) for n, want in zip(have.shape, shape, strict=True)):
            want = ", ".join("n" if n is None else str(n) for n in shape)
            free = f", {len(shape)} sizes of 1 or more" if None in shape else ""
            raise CheckpointError(f"The tensor {name:.100} in {file.path} has the shape {list(have.shape)}; as the "
                                  f"config says how it is packed, it must be [{want}]{free}.")
        return have.shape

    def whole(self, part: str, dtype: str) -> NDArray[Any]:
        """All elements of a part as they are stored; a number without dimensions as an array of one."""
        return self.rows(part, 0, (self.stored(part).shape or (1,))[0], dtype)

    def rows(self, part: str, start: int, stop: int, dtype: str, axes: int = 1) -> NDArray[Any]:
        """Some rows of a part as they are stored, counted over this many leading axes."""
        file, name = self._found[part]
        shape = file.tensors[name].shape
        return file.read_rows_as(name, start, stop, dtype, axes).reshape(stop - start, *shape[axes:])

    def float_rows(self, part: str, start: int, stop: int) -> Floats:
        """Return some rows of a matrix of floats as float32."""
        file, name = self._found[part]
        columns = file.tensors[name].shape[1]
        return file.read(name, [start * columns], (stop - start) * columns).reshape(-1, columns)

    def floats(self, part: str, what: str = "scale") -> Floats:
        """All elements of a part that has floats, which must be finite."""
        file, name = self._found[part]
        tensor = file.tensors[name]
        if tensor.dtype == "F8_E4M3":
            values = E4M3[self.whole(part, "u1")]
        elif tensor.dtype in ("F8_E8M0", "U8"):  # exponents, in files of programs whose torch has no type for them
            exponents = self.whole(part, "u1")
            values = np.ldexp(np.float32(1), np.minimum(exponents, 254).astype(np.int32) - 127)
            values[exponents == 255] = np.nan
        else:
            values = file.read(name, [0], prod(tensor.shape))
        if not np.isfinite(values).all():
            raise CheckpointError(f"The tensor {name:.100} in {file.path} has a {what} that is NaN or infinite; "
                                  "download the file again.")
        return values.astype(np.float32, copy=False).reshape(tensor.shape)


class PackedTensor:
    """One tensor of [out, in], made of parts; like `SafetensorsFile` for tensors of floats.

    Parameters
    ----------
    name : str
        Of the tensor that was quantised.
    kind : PackedKind
    shape : tuple of int
        (..., rows, columns); leading axes are stacked rows.
    parts : Parts
    load : callable
        Reads the tensors that are kept while rows are read.
    recent : Recent
    order : int32 array of shape (columns,), optional
        Columns in the order of their groups, where that is not their own.
    """

    def __init__(self, name: str, kind: PackedKind, shape: tuple[int, ...], parts: Parts,
                 load: Callable[[Parts], Loaded], recent: Recent, order: NDArray[np.int32] | None = None):
        self.path, self.kind, self.parts, self.order = parts.path, kind, parts, order
        self.tensors = {name: SourceTensor(kind.name, shape, 0, parts.nbytes)}
        self.aliases: dict[str, str] = {}
        self._name, self._load, self._recent = name, load, recent

    def close(self) -> None:
        """Close the files of its parts."""
        self.parts.close()

    def block(self, start: int, stop: int) -> Block:
        """Rows start to stop."""
        loaded = self._recent.get(self._name, lambda: self._load(self.parts))
        rows = slice(start, stop)
        blocks = rows if self.kind.rows == 1 else np.arange(start, stop) // self.kind.rows
        scales = loaded.scales if len(loaded.scales) == 1 else loaded.scales[blocks]
        codes = loaded.codes(start, stop)
        return Block(codes, np.broadcast_to(scales, (len(codes), scales.shape[1])),
                     None if loaded.zeros is None else loaded.zeros[rows],
                     None if loaded.minima is None else loaded.minima[rows], loaded.group_of, self.kind.group_size,
                     loaded.levels)

    def read(self, name: str, starts: Sequence[int], count: int) -> Floats:
        """Read `count` elements from each of the elements `starts` on, as float32 of shape (len(starts), count)."""
        width = self.tensors[name].shape[-1]
        if len(starts) > 1 and starts[0] % width + count <= width and _rows_in_order(starts, width):
            first, column = divmod(starts[0], width)
            return self.block(first, first + len(starts)).values()[:, column : column + count]
        pieces = np.empty((len(starts), count), np.float32)
        for start, piece in zip(starts, pieces, strict=True):
            first, column = divmod(start, width)
            values = self.block(first, -(-(start + count) // width)).values()
            piece[:] = values.reshape(-1)[column : column + count]
        return pieces


def _rows_in_order(starts: Sequence[int], width: int) -> bool:
    return bool((np.diff(starts) == width).all())
