"""Read a GGUF file without trusting it: every count and size is compared with the file before anything is made of it.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian: a header (fields, then a table of tensors), padding, the
tensors' bytes. A model may be split over several files, of which the first has the fields.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.errors import CheckpointError

from .header import MAGIC, GgufHeader, HeaderReader, PassedOver, damaged

SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL | re.IGNORECASE)
"""Names of the parts of a split model."""


def is_gguf(path: Path) -> bool:
    """Return whether a file is one, by its first bytes or its name."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC or path.suffix == ".gguf"
    except OSError as error:  # a failing disk says nothing of the file; its reader reports it
        return error.errno == errno.EIO


def gguf_origin(path: Path) -> Path:
    """Return the target of links; a part of a split model keeps a name by which the others are found.

    The hub's cache has links with the parts' names to files that are called by their checksums.
    """
    real = path.resolve()
    named = SPLIT.fullmatch(path.name) and not SPLIT.fullmatch(real.name)
    return path.parent.resolve() / path.name if named else real


def gguf_parts(path: Path) -> list[Path]:
    """Paths of all files of a model that begins with this one, by its name."""
    match = SPLIT.fullmatch(path.name)
    if not match or int(match[2]) != 1:
        return [path]
    rest = path.name[match.end(2) :]
    return [path.with_name(f"{match[1]}-{i:05d}{rest}") for i in range(1, int(match[3]) + 1)]


def read_header(path: Path, passed: PassedOver | None = None) -> GgufHeader:
    """Return the header of one file; of the data nothing is read, and nothing has to be there.

    With `passed` the texts of arrays, which take nearly all the time, are passed over.

    Raises
    ------
    CheckpointError
        It cannot be read, is not a GGUF file of a version that can be read, is truncated or contradicts itself.
    """
    with os_errors(CheckpointError, f"Cannot read the GGUF file {path}"), open_plain(path) as file:
        reader = HeaderReader(file, path, passed)
        try:
            return reader.header()
        except CheckpointError:
            if not reader.presumed:
                raise
            file.seek(0)
            return HeaderReader(file, path, PassedOver()).header()


def read_headers(path: Path, passed: PassedOver | None = None) -> list[GgufHeader]:
    """Return the headers of all files of a model that begins with this one, the first of a split or the only one.

    With `passed` as `read_header`.

    Raises
    ------
    CheckpointError
        As `read_header`; or a part of a split is missing, or belongs to another one, or is not the first.
    """
    first = read_header(path, passed)
    count = _split_number(first, "count")
    if count <= 1:
        return [first]
    path = path if SPLIT.fullmatch(path.name) else gguf_origin(path)
    match = SPLIT.fullmatch(path.name)
    if not match or int(match[3]) != count:
        raise CheckpointError(f"{path} is one of {count} parts of a split model, so its name must end in "
                              f"-00001-of-{count:05d}.gguf, as those of the others do; rename it.")
    if (number := _split_number(first, "no")) != 0:
        raise CheckpointError(f"{path} is part {number + 1} of {count} of a split model; give the first, "
                              f"{path.with_name(f'{match[1]}-00001-of-{count:05d}.gguf')}.")
    headers = [first]
    for i, part in enumerate(gguf_parts(path)[1:], 1):
        if not part.exists():
            raise CheckpointError(f"{path} is the first of {count} parts, and {part} is missing; download it too.")
        headers.append(read_header(part, passed))
        _check_part(headers[-1], first, i)
    total, wanted = sum(len(header.tensors) for header in headers), first.fields.get("split.tensors.count")
    if wanted is not None and wanted != total:
        raise CheckpointError(f"The {count} parts of {path} have {total} tensors, but the first says {wanted}; the "
                              "parts do not belong together: download them again.")
    return headers


def _check_part(part: GgufHeader, first: GgufHeader, number: int) -> None:
    """Refuse a part of another split, or one that was given another's name."""
    names = "general.architecture", "split.tensors.count", "split.count"
    foreign = any(name in part.fields and part.fields[name] != first.fields.get(name) for name in names)
    if foreign or _split_number(part, "no") != number or "split.count" not in part.fields:
        raise CheckpointError(f"{part.path} is not part {number + 1} of the model that begins with {first.path}; "
                              "download both again.")


def _split_number(header: GgufHeader, name: str) -> int:
    value = header.fields.get(f"split.{name}", 0)
    if type(value) is not int or not 0 <= value <= 99999:
        raise damaged(header.path, f"split.{name} is {value!r:.40}")
    return value
