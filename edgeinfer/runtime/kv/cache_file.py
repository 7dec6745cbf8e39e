"""Files of KV blocks: magic, header length, JSON header with a checksum, then pieces of planes."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import os_errors, replacement
from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import BundleError, ClosedError, DestinationError
from edgeinfer.memory_planner import SLOT_UNIT
from edgeinfer.runner import GONE

if TYPE_CHECKING:
    from .sequence import KVCache

MAX_HEADER_BYTES = 64 << 20
LAYOUT = 3
"""Layout of K and V in these files: 1 block by block, with the parts of all heads; 2 plane by plane; 3 layer by layer,
of layers with a window only the kept blocks.
"""
PIECE_BYTES = 1 << 18
"""Bytes by which a file is read and written at most, if that is a block of a head."""

Piece = tuple[NDArray[np.uint8], list[int]]
"""A plane of shape (blocks, bytes), and the blocks of it that a file has."""


class CacheFile(NamedTuple):
    """One kind of such files."""

    name: str
    """Name in messages."""
    magic: bytes
    """First 8 bytes."""

    def write(self, path: Path, header: dict[str, Any], pieces: Callable[[], Iterable[Piece]]) -> None:
        """Write a file; its checksum takes a first turn over the pieces.

        Raises `DestinationError` if it cannot be written; nothing is left behind, and an older file stays as it was.
        """
        digest = start_digest(header)
        for plane, blocks in pieces():
            digest.update(plane[blocks].data)
        text = json.dumps(header | {"sha256": digest.hexdigest()}).encode()
        with os_errors(DestinationError, f"Cannot write the {self.name} {path}"), replacement(path) as file:
            file.write(self.magic + struct.pack("<Q", len(text)) + text)
            for plane, blocks in pieces():
                file.write(plane[blocks].data)

    def read_header(self, file: io.BufferedReader, path: Path) -> dict[str, Any]:
        """Read a header that is an object with a checksum; raises `BundleError` for anything else."""
        start = file.read(16)
        if start[:8] != self.magic or len(start) < 16:
            raise BundleError(f"{path} is not a {self.name} of edgeinfer.")
        size = struct.unpack("<Q", start[8:])[0]
        try:
            header = parse_json(file.read(size) if size <= MAX_HEADER_BYTES else b"")
        except ValueError:
            header = None
        if not isinstance(header, dict) or "sha256" not in header:
            raise self.damaged(path)
        return header

    def read(self, file: io.BufferedReader, header: dict[str, Any], pieces: Iterable[Piece]) -> bool:
        """Read all pieces but the blocks that are GONE into their planes; return whether length and checksum agree."""
        digest = start_digest({key: value for key, value in header.items() if key != "sha256"})
        for plane, blocks in pieces:
            piece, numbers = np.empty((len(blocks), plane.shape[1]), np.uint8), np.array(blocks)
            if file.readinto(piece.data) != piece.nbytes:
                return False
            digest.update(piece.data)
            plane[numbers[numbers != GONE]] = piece[numbers != GONE]
        return not file.read(1) and digest.hexdigest() == header["sha256"]

    def damaged(self, path: Path) -> BundleError:
        """Return the error for a file that contradicts itself."""
        return BundleError(f"The {self.name} {path} is damaged or cut short; give another file.")

    def unreadable(self, path: Path, error: OSError) -> BundleError:
        """Return the error for a file that the system does not read."""
        return BundleError(f"Cannot read the {self.name} {path}: {error.strerror or error}.")

    def other(self, path: Path) -> BundleError:
        """Return the error for a file with the K and V of another run."""
        return BundleError(
            f"The {self.name} {path} was saved by another model or version of edgeinfer, or with another --kv, "
            "--recipe, --ctx, --speculate or instruction set; give another file."
        )


def start_digest(header: dict[str, Any]) -> Any:
    """Return a checksum that has seen the header; the pieces come next."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode())


def origin(kv: KVCache, model: str) -> dict[str, Any]:
    """Return the header fields that identify the model and settings of a file's K and V; raises `ClosedError` for a
    closed session.
    """
    if not kv.planes:
        raise ClosedError("The model was closed; open it again.")
    return {"model": model, "kv": kv.plan.request.kv, "block_bytes": kv.plan.kv_block_bytes,
            "layers": len(kv.plan.kv_layers), "layout": LAYOUT}


def head_pieces(kv: KVCache, whole: list[int], recent: list[int]) -> Iterator[Piece]:
    """Yield each head of each plane with its blocks, which are others (`recent`) in layers with a window."""
    heads = [(layer, head) for planes in kv.planes for plane in planes.arrays
             for layer, of_layer in zip(planes.layers, plane, strict=True) for head in of_layer]
    for layer, head in sorted(heads, key=lambda each: each[0]):
        yield from in_pieces(head, recent if layer in kv.window_layers else whole)


def state_pieces(kv: KVCache, slot: int) -> Iterator[Piece]:
    """Yield a slot of recurrent state, which is GONE if it is only read."""
    rows = kv.state_memory.reshape(-1, SLOT_UNIT)
    n = len(rows) // len(kv.state_memory)
    yield from in_pieces(rows, [GONE] * n if slot == GONE else list(range(slot * n, slot * n + n)))


def in_pieces(plane: NDArray[np.uint8], blocks: list[int]) -> Iterator[Piece]:
    """Yield a plane with a few of the blocks at a time."""
    n = max(1, PIECE_BYTES // plane.shape[-1])
    for i in range(0, len(blocks), n):
        yield plane, blocks[i : i + n]
