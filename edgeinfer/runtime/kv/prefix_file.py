"""Prefix files: the prefix cache on disk, blocks and checkpoints with their keys, so that it outlives its process."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain
from edgeinfer.errors import RequestError
from edgeinfer.runner import GONE
from edgeinfer.runner.prefix_cache import PrefixCache
from edgeinfer.runner.state_slots import NOTE

from .cache_file import CacheFile, Piece, head_pieces, in_pieces, origin, state_pieces
from .sequence import KVCache

FILE = CacheFile("prefix file", b"EDGEPF01")
KEY_BYTES = 32
BLOCKS, RECENT, STATES = COUNTS = "blocks", "recent", "states"
"""Keys of a header: blocks of layers that keep all tokens, of layers with a window, and states of recurrent layers."""

Keys = dict[str, NDArray[np.uint8]]
"""Keys of the blocks of each pool, (blocks, KEY_BYTES), in the order in which a file has both; those of states are
followed by their notes (`StateSlots.note`)."""


class Pool(NamedTuple):
    """One pool of a KV cache, as a file has its blocks: each by its key, perhaps with a note."""

    blocks: PrefixCache
    take: Callable[[], int]
    """Takes a free block."""
    note_bytes: int = 0
    note: Callable[[int], bytes] = lambda block: b""
    """Returns the note of a block."""
    noted: Callable[[int, bytes], bool] = lambda block, note: True
    """Accepts the note of a block that is about to be cached; returns whether it is plausible."""

    @property
    def key_bytes(self) -> int:
        """Bytes of a key with its note."""
        return KEY_BYTES + self.note_bytes


class PrefixFile:
    """Writes and reads the prefix cache of one KV cache.

    A file has the keys of blocks and no tokens. The blocks that would be evicted last come first, each before those
    that follow it in a text, so a smaller pool takes the best part of a file.
    """

    def __init__(self, kv: KVCache):
        self._kv, self._pools = kv, {BLOCKS: Pool(kv.pool, kv.take)}
        if kv.recent:
            self._pools[RECENT] = Pool(kv.recent.pool, kv.recent.take)
        if states := kv.states:
            self._pools[STATES] = Pool(states.pool, states.pool.take, NOTE.size, states.note, states.noted)

    def save(self, path: Path, model: str) -> int:
        """Write all cached blocks: the header, the keys, of each layer, plane and KV head the blocks, then the states.

        Returns
        -------
        int
            How many blocks of layers that keep all tokens.

        Raises
        ------
        DestinationError
            The file cannot be written; nothing is left behind, and an older file stays as it was.
        RequestError
            Prompts are pruned, so nothing is cached.
        """
        entries = {name: pool.blocks.entries() for name, pool in self._pools.items()}
        keys = {name: np.array([list(key + pool.note(block)) for key, block in entries[name]], np.uint8).reshape(
            len(entries[name]), pool.key_bytes) for name, pool in self._pools.items()}
        blocks = {name: [block for _, block in of_pool] for name, of_pool in entries.items()}
        header = self._header(path, model) | {name: len(entries.get(name, ())) for name in COUNTS}
        FILE.write(path, header, lambda: self._pieces(keys, lambda: blocks))
        return len(blocks[BLOCKS])

    def load(self, path: Path, model: str) -> int:
        """Read blocks into those that are free, as many as there are, and cache them; blocks cached already stay.

        Returns
        -------
        int
            How many blocks of layers that keep all tokens are new in the cache.

        Raises
        ------
        BundleError
            The file cannot be read, is damaged, or belongs to another model, KV type or arrangement of layers.
        RequestError
            Prompts are pruned, so nothing is cached.
        """
        expected = self._header(path, model)
        try:
            with open_plain(path) as file:
                header = FILE.read_header(file, path)
                if not header.items() >= expected.items():
                    raise FILE.other(path)
                if not self._has_length(file, header):
                    raise FILE.damaged(path)
                return self._read(file, path, header)
        except OSError as error:
            raise FILE.unreadable(path, error) from None

    def _read(self, file: io.BufferedReader, path: Path, header: dict[str, Any]) -> int:
        """Read the data after a header; blocks are cached if the checksum is right, and freed otherwise."""
        keys = {name: np.empty((header[name], pool.key_bytes), np.uint8) for name, pool in self._pools.items()}
        taken: dict[str, dict[bytes, int]] = {name: {} for name in self._pools}
        try:
            if not FILE.read(file, header, self._pieces(keys, lambda: self._take(keys, taken))) \
                    or not self._note(keys, taken):
                raise FILE.damaged(path)
        except BaseException:
            for name, pool in self._pools.items():
                for block in taken[name].values():
                    pool.blocks.drop(block)
            raise
        for name, pool in self._pools.items():
            pool.blocks.adopt(taken[name])
        return len(taken[BLOCKS])

    def _take(self, keys: Keys, taken: dict[str, dict[bytes, int]]) -> dict[str, list[int]]:
        """Take free blocks for new keys; return a block for each key of a file, GONE for the others."""
        found: dict[str, list[int]] = {name: [] for name in keys}
        for name, pool in self._pools.items():
            blocks = taken[name]
            for key in map(bytes, keys[name][:, :KEY_BYTES]):
                new = pool.blocks.n_free and key not in blocks and pool.blocks.find(key) is None
                if new:
                    blocks[key] = pool.take()
                found[name].append(blocks[key] if new else GONE)
        return found

    def _pieces(self, keys: Keys, blocks: Callable[[], dict[str, list[int]]]) -> Iterator[Piece]:
        """Yield the arrays of a file in order: keys, of each head of a plane the blocks, and states."""
        for of_pool in keys.values():
            yield from in_pieces(of_pool, [*range(len(of_pool))])
        found = blocks()
        yield from head_pieces(self._kv, found[BLOCKS], found.get(RECENT, []))
        for slot in found.get(STATES, ()):
            yield from state_pieces(self._kv, slot)

    def _note(self, keys: Keys, taken: dict[str, dict[bytes, int]]) -> bool:
        """Accept the notes of new blocks; return whether they are plausible."""
        for name, pool in self._pools.items():
            notes = {row[:KEY_BYTES].tobytes(): row[KEY_BYTES:].tobytes() for row in reversed(keys[name])}
            if not all(pool.noted(block, notes[key]) for key, block in taken[name].items()):
                return False
        return True

    def _header(self, path: Path, model: str) -> dict[str, Any]:
        """Return the fields that a file must have to be of use here."""
        if self._kv.pruning:
            raise RequestError(f"Prompts are pruned (--{next(iter(self._kv.pruning))}), so no beginning of a prompt is "
                               f"cached; leave the prefix file {path} out.")
        header = origin(self._kv, model) | {"window_layers": sorted(self._kv.window_layers)}
        return header | ({"slot_bytes": self._kv.state_memory.shape[1]} if self._kv.states else {})

    def _has_length(self, file: io.BufferedReader, header: dict[str, Any]) -> bool:
        """Return whether a file is as long as its header says, before memory is taken for that."""
        if not all(type(header.get(name)) is int and header[name] >= 0 for name in COUNTS):
            return False
        if any(header[name] for name in COUNTS if name not in self._pools):
            return False
        sizes = {name: pool.key_bytes for name, pool in self._pools.items()}
        for planes in self._kv.planes:
            name = BLOCKS if self._kv.window_layers.isdisjoint(planes.layers) else RECENT
            sizes[name] += sum(array.nbytes // array.shape[2] for array in planes.arrays)
        if self._kv.states:
            sizes[STATES] += self._kv.state_memory.shape[1]
        left = os.fstat(file.fileno()).st_size - file.tell()
        return left == sum(header[name] * size for name, size in sizes.items())
