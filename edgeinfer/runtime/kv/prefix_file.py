"""Prefix files: the blocks of the prefix cache with their keys, on disk, so that it outlives its process."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.files import open_plain
from edgeinfer.errors import RequestError
from edgeinfer.runner import GONE

from .cache_file import CacheFile, Piece, head_pieces, in_pieces, origin
from .sequence import KVCache

FILE = CacheFile("prefix file", b"EDGEPF01")
KEY_BYTES = 32
COUNTS = "blocks", "recent"
"""Keys of a header: blocks of layers that keep all tokens, and of layers with a window."""

Keys = list[NDArray[np.uint8]]
"""Keys of the blocks of each pool, (blocks, KEY_BYTES), in the order in which a file has both."""


class PrefixFile:
    """Writes and reads the prefix cache of one KV cache.

    A file has the keys of blocks and no tokens. The blocks that would be evicted last come first, each before those
    that follow it in a text, so a smaller pool takes the best part of a file.

    Parameters
    ----------
    kv : KVCache
    """

    def __init__(self, kv: KVCache):
        self._kv = kv
        self._pools = [(kv.pool, kv.take), *([(kv.recent.pool, kv.recent.take)] if kv.recent else [])]

    def save(self, path: Path, model: str) -> int:
        """Write all cached blocks: the header, the keys, then of each layer, plane and KV head the blocks.

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
        header, keys, blocks = self._header(path, model), list[NDArray[np.uint8]](), list[list[int]]()
        for pool, _ in self._pools:
            entries = pool.entries()
            keys.append(np.array([list(key) for key, _ in entries], np.uint8).reshape(-1, KEY_BYTES))
            blocks.append([block for _, block in entries])
        header |= {name: 0 for name in COUNTS} | dict(zip(COUNTS, map(len, blocks), strict=False))
        FILE.write(path, header, lambda: self._pieces(keys, lambda: blocks))
        return len(blocks[0])

    def load(self, path: Path, model: str) -> int:
        """Read blocks into those that are free, as many as there are, and cache them; what is cached already stays.

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
        """Read what follows a header; blocks are cached if the checksum is right, and else given back."""
        keys = [np.empty((header[name], KEY_BYTES), np.uint8) for name, _ in zip(COUNTS, self._pools, strict=False)]
        taken: list[dict[bytes, int]] = [{} for _ in keys]
        try:
            if not FILE.read(file, header, self._pieces(keys, lambda: self._take(keys, taken))):
                raise FILE.damaged(path)
        except BaseException:
            for (pool, _), blocks in zip(self._pools, taken, strict=True):
                for block in blocks.values():
                    pool.drop(block)
            raise
        for (pool, _), blocks in zip(self._pools, taken, strict=True):
            pool.adopt(blocks)
        return len(taken[0])

    def _take(self, keys: Keys, taken: list[dict[bytes, int]]) -> list[list[int]]:
        """Take free blocks for new keys; return a block for each key of a file, GONE for the others."""
        found: list[list[int]] = [[] for _ in keys]
        for (pool, take), of_pool, blocks, numbers in zip(self._pools, keys, taken, found, strict=True):
            for key in map(bytes, of_pool):
                new = pool.n_free and key not in blocks and pool.find(key) is None
                if new:
                    blocks[key] = take()
                numbers.append(blocks[key] if new else GONE)
        return found

    def _pieces(self, keys: Keys, blocks: Callable[[], list[list[int]]]) -> Iterator[Piece]:
        """Yield the arrays of a file in order: keys, and then of each head of a plane the blocks."""
        for of_pool in keys:
            yield from in_pieces(of_pool, [*range(len(of_pool))])
        whole, *recent = blocks()
        yield from head_pieces(self._kv, whole, *recent or [[]])

    def _header(self, path: Path, model: str) -> dict[str, Any]:
        """Return the fields that a file must have to be of use here."""
        if self._kv.pruning:
            raise RequestError(f"Prompts are pruned (--{next(iter(self._kv.pruning))}), so no beginning of a prompt is "
                               f"cached; leave the prefix file {path} out.")
        return origin(self._kv, model) | {"window_layers": sorted(self._kv.window_layers)}

    def _has_length(self, file: io.BufferedReader, header: dict[str, Any]) -> bool:
        """Return whether a file is as long as its header says, before memory is taken for that."""
        counts, sizes = [header.get(name) for name in COUNTS], [KEY_BYTES, KEY_BYTES]
        if not all(type(count) is int and count >= 0 for count in counts):
            return False
        for planes in self._kv.planes:
            windowed = not self._kv.window_layers.isdisjoint(planes.layers)
            sizes[windowed] += sum(array.nbytes // array.shape[2] for array in planes.arrays)
        left = os.fstat(file.fileno()).st_size - file.tell()
        return left == sum(header[name] * size for name, size in zip(COUNTS, sizes, strict=True))
