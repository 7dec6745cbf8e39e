"""Files of a bundle: each must be there, of the length that the header says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.base.files import open_plain, refuse_special
from edgeinfer.errors import BundleError

from .checksums import Piece
from .format import WEIGHTS_FILE, FileEntry, Header
from .header import HEADER_FILE, MAX_HEADER_BYTES
from .mapping import MappedFile, check_length

if TYPE_CHECKING:
    from .reader import Bundle


def is_bundle(path: str | Path) -> bool:
    """Return whether the directory looks like a bundle (it has a bundle.json); nothing is checked."""
    return (Path(path) / HEADER_FILE).is_file()


def read_header(path: Path) -> bytes:
    """Read bundle.json, or little more than it may have."""
    if not path.is_dir():
        raise BundleError("there is no such directory." if not path.exists() else "it is not a directory.")
    try:
        with open_plain(path / HEADER_FILE) as file:
            return file.read(MAX_HEADER_BYTES + 1)
    except FileNotFoundError:
        raise BundleError(f"it has no {HEADER_FILE}.") from None
    except OSError as error:
        raise BundleError(f"{HEADER_FILE}: {error.strerror or error}.") from None


def state_of(path: Path, entry: FileEntry) -> os.stat_result:
    """Return the status of a listed file, which must be a regular file of the right length."""
    try:
        status = os.stat(path / entry.name)
        refuse_special(path / entry.name, status)
    except FileNotFoundError:
        raise BundleError(f"its file {entry.name} is missing.") from None
    except OSError as error:
        raise BundleError(f"its file {entry.name}: {error.strerror or error}.") from None
    check_length(entry.name, status.st_size, entry.nbytes)
    return status


def map_weights_file(path: Path, header: Header) -> MappedFile:
    """Map weights.bin."""
    try:
        return MappedFile(path / WEIGHTS_FILE, header.weights_bytes)
    except FileNotFoundError:
        raise BundleError(f"its file {WEIGHTS_FILE} is missing.") from None
    except OSError as error:
        raise BundleError(f"its file {WEIGHTS_FILE}: {error.strerror or error}.") from None


def weights_pieces(path: Path, header: Header) -> Iterator[Piece]:
    """Yield every byte of weights.bin: tensors, and the gaps between them and after the last."""
    file, end = path / WEIGHTS_FILE, 0
    for entry in header.tensors:
        if entry.offset > end:
            yield Piece(file, f"gap at byte {end} of {WEIGHTS_FILE}", entry.offset - end, "", end)
        yield Piece(file, f"tensor {entry.name!r}", entry.nbytes, entry.sha256, entry.offset, max(1, entry.pieces),
                    entry.stride)
        end = max(end, entry.piece_offsets[-1] + entry.piece_bytes)
    if header.weights_bytes > end:
        yield Piece(file, f"gap at byte {end} of {WEIGHTS_FILE}", header.weights_bytes - end, "", end)


def check_parts(bundle: Bundle, clusters: bool = False) -> None:
    """Refuse parts that are not this bundle's weights'; read all `clusters` of cold neurons."""
    if bundle.parts & {"predictor", "statistics", "cold"}:
        from .cold import read_cold
        from .parts import read_predictor, read_statistics

        read_predictor(bundle)
        read_statistics(bundle)
        if (cold := read_cold(bundle)) and clusters:
            cold.verify()
    if "draft_head" in bundle.parts:
        from .draft_heads import read_draft_head

        read_draft_head(bundle)
    if "screen" in bundle.parts:
        from .screens import read_screen

        read_screen(bundle)
