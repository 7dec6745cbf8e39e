"""The header of a GGUF file, read without trusting it: every count and size is compared with the file first."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import CheckpointError

from .ollama_names import as_llama_cpp
from .types import GGUF_TYPES, GgufType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_PAIRS, MAX_TENSORS, MAX_ITEMS, MAX_TEXT = 4096, 1 << 20, 1 << 24, 1 << 24
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 16
CHUNK_BYTES = 1 << 20
"""First piece of a header that is read; later ones double the size."""
KEY_BYTES = 1024
"""First and last of an array of texts, by which it is looked up."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One row of the table of tensors."""

    kind: GgufType
    shape: tuple[int, ...]
    """(rows, columns), as elsewhere in this project: the file has the fastest dimension first."""
    offset: int
    """First byte, counted from the beginning of the tensors' data."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return self.kind.bytes_of(prod(self.shape))


@dataclass(frozen=True)
class GgufHeader:
    """Contents of a file before its tensors."""

    path: Path
    fields: dict[str, Any]
    """Values by key. Arrays of numbers are `array.array`, of flags bytes, of texts lists; a range as long where
    texts were passed over."""
    tensors: dict[str, GgufTensor]
    data: int
    """Offset of the tensors' data."""
    size: int
    """Bytes of the file."""
    version: int = VERSIONS[-1]
    """Version of GGUF."""

    def check_data(self) -> None:
        """Refuse tensors that leave the file or overlap; raises `CheckpointError`."""
        end, before = 0, ""
        for name, tensor in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset < end:
                raise damaged(self.path, f"the tensors {before:.60} and {name:.60} overlap")
            end, before = tensor.offset + tensor.nbytes, name
            if self.data + end > self.size:
                raise CheckpointError(
                    f"{self.path} is cut short: it has {self.size} bytes, but the tensor {name:.60} ends at byte "
                    f"{self.data + end}; download it again.")


class PassedOver:
    """Arrays of texts that were passed over, so that the same vocabulary in the next file is passed in one step.

    An array is taken for a known one where their counts, their first and their last bytes are the same. Whoever is
    misled by a file that was made for it ends where no field begins, and reads again without this.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}

    def ends(self, count: int, beginning: bytes) -> list[tuple[int, bytes]]:
        """Return the lengths of known arrays that begin so, each with its last bytes."""
        return self._known.get((count, beginning), [])

    def add(self, count: int, array: bytes) -> None:
        """Remember an array."""
        self._known.setdefault((count, array[:KEY_BYTES]), []).append((len(array), array[-KEY_BYTES:]))


class HeaderReader:
    """Cursor over the header; it reads instead of mapping, because a file that shrinks would end the process."""

    def __init__(self, file: BinaryIO, path: Path, passed: PassedOver | None = None):
        self._file, self._path, self._passed = file, path, passed
        self._whole = self._size = os.fstat(file.fileno()).st_size
        self._data, self._at = b"", 0
        self.presumed = 0
        """Bytes before `_data` that were not read: known arrays, and everything before them."""

    def header(self) -> GgufHeader:
        """Return all that is before the tensors."""
        if not self._size or not MAGIC.startswith(self._peek(4)):
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with GGUF.")
        self._take(4)
        version = self._number("I")
        self._check_version(version)
        n_tensors, n_pairs = self._count(MAX_TENSORS, "tensors", 24), self._count(MAX_PAIRS, "fields", 13)
        fields: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self._text()
            if key in fields:
                raise self._bad(f"it has the field {key:.60} twice")
            fields[key] = self._value(self._number("I"))
        alignment = self._alignment(fields)
        tensors: dict[str, GgufTensor] = {}
        for _ in range(n_tensors):
            name = self._text()
            if name in tensors:
                raise self._bad(f"it has the tensor {name:.60} twice")
            tensors[name] = self._tensor(name, alignment)
        end = self.presumed + self._at
        fields, tensors = as_llama_cpp(fields, tensors)
        return GgufHeader(self._path, fields, tensors, -(-end // alignment) * alignment, self._whole, version)

    def _check_version(self, version: int) -> None:
        if version in VERSIONS:
            return
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, *VERSIONS):
            raise CheckpointError(f"{self._path} is a big-endian GGUF file (version {swapped}); convert it to "
                                  "little-endian, the supported byte order.")
        remedy = "download a newer conversion" if version < min(VERSIONS) else "update edgeinfer"
        raise CheckpointError(f"{self._path} has GGUF version {version}; versions 2 and 3 are supported: {remedy}.")

    def _alignment(self, fields: Mapping[str, Any]) -> int:
        value = fields.get("general.alignment", 32)
        if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._bad(f"general.alignment is {value!r:.40}, no power of two up to {MAX_ALIGNMENT}")
        return value

    def _tensor(self, name: str, alignment: int) -> GgufTensor:
        n_dims = self._number("I")
        if not 1 <= n_dims <= 4:
            raise self._bad(f"the tensor {name:.60} has {n_dims} dimensions")
        sizes = struct.unpack(f"<{n_dims}Q", self._take(8 * n_dims))
        while len(sizes) > 1 and sizes[-1] == 1:  # to ggml, all tensors have four dimensions
            sizes = sizes[:-1]
        number, offset = struct.unpack("<IQ", self._take(12))
        if not all(sizes) or prod(sizes) > MAX_ELEMENTS:
            raise self._bad(f"the tensor {name:.60} has the dimensions {list(sizes)}, which are impossible")
        if number not in GGUF_TYPES:
            raise CheckpointError(f"The tensor {name:.60} of {self._path} has GGUF type {number}, which this version "
                                  f"of edgeinfer does not know (it knows types up to {max(GGUF_TYPES)}); take a "
                                  "file of another type, such as Q4_K_M, or update edgeinfer.")
        kind = GGUF_TYPES[number]
        if sizes[0] % kind.elements:
            raise self._bad(f"the tensor {name:.60} has rows of {sizes[0]} elements, which are not blocks of "
                            f"{kind.elements}, as {kind.name} needs")
        if offset % alignment or offset > 1 << 62:
            raise self._bad(f"the tensor {name:.60} begins at byte {offset} of the data, no multiple of {alignment}")
        return GgufTensor(kind, sizes[::-1], offset)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._form(kind))
        kind = self._number("I")
        if kind == _ARRAY:
            raise self._bad("an array holds arrays")
        if kind == _STRING:
            count = self._count(MAX_ITEMS, "items of an array", 8)
            return self._texts(count) if self._passed is None else self._pass_texts(count, self._passed)
        form = self._form(kind)
        data = self._take(self._count(MAX_ITEMS, "items of an array", struct.calcsize(form)) * struct.calcsize(form))
        if form == "?":
            return data
        numbers = array(form, data)
        if struct.pack("=H", 1) != struct.pack("<H", 1):
            numbers.byteswap()
        return numbers

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"A field of {self._path} has the type {kind}, which this version of edgeinfer does "
                                  f"not know (it knows types up to {max(_SCALARS)}); update edgeinfer, or download the "
                                  "file again if other programs cannot read it either.")
        return _SCALARS[kind]

    def _texts(self, count: int) -> list[str]:
        """The strings of an array; a vocabulary has some hundred thousand, so this is one tight loop.

        Bytes that are not UTF-8 are kept as halves of surrogate pairs: users of the texts refuse them.
        """
        out: list[str] = []
        data, at, end = self._data, self._at, len(self._data)
        for _ in range(count):
            begin = at + 8
            stop = begin + int.from_bytes(data[at:begin], "little") if begin <= end else begin
            if stop > end:
                self._at = at
                self._want(8)
                self._want(8 + int.from_bytes(self._data[at:begin], "little"))
                data, end = self._data, len(self._data)
                stop = begin + int.from_bytes(data[at:begin], "little")
            out.append(data[begin:stop].decode("utf-8", "surrogateescape"))
            at = stop
        self._at = at
        return out

    def _pass_texts(self, count: int, passed: PassedOver) -> range:
        """Go after the strings of an array; only their lengths are looked at."""
        self._want(min(KEY_BYTES, self._size - self._at))
        beginning = self._data[self._at : self._at + KEY_BYTES]
        for nbytes, end in passed.ends(count, beginning):
            if nbytes > len(end) and self._at + nbytes <= self._size and self._leap(nbytes, end):
                return range(count)
        begin, at, data, length_at = self._at, self._at, self._data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(data):
                self._at = at
                self._want(8)
                data = self._data
            at += 8 + length_at(data, at)[0]
        self._at = begin
        self._want(at - begin)
        self._at = at
        passed.add(count, self._data[begin:at])
        return range(count)

    def _leap(self, nbytes: int, end: bytes) -> bool:
        """Skip this many bytes, if those before the target are these; the bytes in between are not read."""
        start = self.presumed + self._at + nbytes
        here = self._file.tell()
        self._file.seek(start - len(end))
        if self._file.read(len(end)) != end:
            self._file.seek(here)
            return False
        self._size, self.presumed, self._data, self._at = self._whole - start, start, b"", 0
        return True

    def _text(self) -> str:
        return self._take(self._count(MAX_TEXT, "bytes of a text", 1)).decode("utf-8", "replace")

    def _count(self, most: int, what: str, each: int) -> int:
        """A number of things that take at least `each` bytes of the rest of the file."""
        value = int(self._number("Q"))
        if value > most:
            raise self._bad(f"it has {value} {what}, above the limit of {most}")
        if value * each > self._size - self._at:
            raise self._cut_short()
        return value

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _take(self, n: int) -> bytes:
        self._want(n)
        self._at += n
        return self._data[self._at - n : self._at]

    def _peek(self, n: int) -> bytes:
        self._want(min(n, self._size))
        return self._data[:n]

    def _want(self, n: int) -> None:
        """Have n more bytes in memory, and never more than the file has."""
        if (missing := self._at + n - len(self._data)) <= 0:
            return
        if self._at + n > self._size:
            raise self._cut_short()
        self._data += self._file.read(min(max(missing, CHUNK_BYTES, len(self._data)), self._size - len(self._data)))
        if len(self._data) < self._at + n:
            raise self._cut_short()

    def _cut_short(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is cut short: its header continues after the file's {self._whole} bytes; "
                               "download it again.")

    def _bad(self, why: str) -> CheckpointError:
        return damaged(self._path, why)


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a header that contradicts itself."""
    return CheckpointError(f"The header of {path} is damaged: {why}; download it again.")
