"""Sequences over the KV pool: block tables, copy-on-write, truncation, and prompt caches on disk."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError, DestinationError, RequestError
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import BlockPool, MemoryPlan

MAGIC = b"EDGEKV01"
MAX_HEADER_BYTES = 64 << 20


@dataclass(eq=False)
class Sequence:
    """Tokens of one context whose K and V are stored."""

    tokens: list[int] = field(default_factory=list)
    """Token ids processed so far."""
    blocks: list[int] = field(default_factory=list)
    """Block table: numbers of the pool's blocks, 16 tokens each."""

    def __len__(self) -> int:
        return len(self.tokens)


class KVCache:
    """The KV region and who holds which block of it.

    Parameters
    ----------
    plan : MemoryPlan
    region : uint8 array
        Memory of the region ``kv``.
    layers : int
    """

    def __init__(self, plan: MemoryPlan, region: NDArray[np.uint8], layers: int):
        self.plan = plan
        self.pool = BlockPool(plan.kv_blocks)
        size = plan.kv_blocks * plan.kv_block_bytes
        self._layers = [region[plan.layer_offset(i) :][:size].reshape(plan.kv_blocks, -1) for i in range(layers)]
        self._living: weakref.WeakSet[Sequence] = weakref.WeakSet()

    # Ctrl-C may come between any two of these lines. Their order sees to it that a block can then be lost, but never be
    # free while a block table names it; what was lost comes back when the pool is empty.

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Make room for n more tokens: a shared last block is copied, new blocks are taken.

        Raises
        ------
        RequestError
            If all blocks are held.
        """
        self.trim(sequence)
        self._living.add(sequence)
        blocks, used = sequence.blocks, len(sequence.tokens)
        if used % abi.BLOCK_TOKENS and self.pool.is_shared(shared := blocks[-1]):
            copy = self._take()
            for layer in self._layers:
                layer[copy] = layer[shared]
            blocks[-1] = copy
            self.pool.drop(shared)
        for _ in range(len(blocks), -(-(used + n_tokens) // abi.BLOCK_TOKENS)):
            blocks.append(self._take())

    def _take(self) -> int:
        """A block of one's own; if none is free, those that no living sequence names are."""
        if not self.pool.n_free:
            self.pool.recount(sequence.blocks for sequence in self._living)
        return self.pool.take()

    def fork(self, sequence: Sequence) -> Sequence:
        """A sequence with the same tokens that shares all blocks until one of the two writes."""
        for block in sequence.blocks:
            self.pool.share(block)
        copy = Sequence(list(sequence.tokens), list(sequence.blocks))
        self._living.add(copy)
        return copy

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        if not 0 <= n_tokens <= len(sequence.tokens):
            raise RequestError(f"Cannot cut a sequence of {len(sequence.tokens)} tokens to {n_tokens}.")
        del sequence.tokens[n_tokens:]
        self.trim(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks past the last token (after a cancelled walk, too)."""
        keep = -(-len(sequence.tokens) // abi.BLOCK_TOKENS)
        gone = sequence.blocks[keep:]
        del sequence.blocks[keep:]
        for block in gone:
            self.pool.drop(block)

    def close(self) -> None:
        """Let go of the memory."""
        self._layers = []

    # -- prompt caches -----------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, path: Path, model: str) -> None:
        """Write tokens and blocks: magic, header length, JSON header, then the blocks of each layer in order.

        Raises
        ------
        DestinationError
            If the file cannot be written; nothing is left behind, and an older file stays as it was.
        """
        import tempfile

        header = self._header(model) | {"tokens": sequence.tokens}
        digest = _start_digest(header)
        for row in self._rows(sequence):
            digest.update(row)
        text = json.dumps(header | {"sha256": digest.hexdigest()}).encode()
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with open(handle, "wb") as file:
                file.write(MAGIC + struct.pack("<Q", len(text)) + text)
                for row in self._rows(sequence):
                    file.write(row)
            os.replace(temporary, path)
        except BaseException as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            if isinstance(error, OSError):
                why = error.strerror or error
                raise DestinationError(f"Cannot write the prompt cache {path}: {why}.") from None
            raise

    def load(self, path: Path, model: str) -> Sequence:
        """Read a sequence saved by the same model with the same KV type.

        Raises
        ------
        BundleError
            If the file cannot be read, is damaged, belongs to another model or KV type, or is longer than the context.
        RequestError
            If the pool has no room for it.
        """
        sequence = Sequence()
        try:
            with open(path, "rb") as file:
                header = self._read_header(file, path, model)
                self.extend(sequence, len(header["tokens"]))
                if self._read_blocks(file, sequence, header) != header["sha256"]:
                    raise _damaged(path)
        except OSError as error:
            self.trim(sequence)
            raise BundleError(f"Cannot read the prompt cache {path}: {error.strerror or error}.") from None
        except BaseException:
            self.trim(sequence)
            raise
        sequence.tokens = header["tokens"]
        return sequence

    def _read_blocks(self, file: BinaryIO, sequence: Sequence, header: dict[str, Any]) -> str:
        """Read straight into the pool, which was planned, and return the checksum; empty if the length is wrong."""
        digest = _start_digest({key: value for key, value in header.items() if key != "sha256"})
        for row in self._rows(sequence):
            if file.readinto(row) != len(row):  # type: ignore[attr-defined]
                return ""
            digest.update(row)
        return "" if file.read(1) else str(digest.hexdigest())

    def _rows(self, sequence: Sequence) -> Iterator[memoryview]:
        """The sequence's blocks, layer by layer."""
        for layer in self._layers:
            yield from (layer[block].data for block in sequence.blocks)

    def _header(self, model: str) -> dict[str, Any]:
        return {"model": model, "kv": self.plan.request.kv, "block_bytes": self.plan.kv_block_bytes,
                "layers": len(self._layers)}

    def _read_header(self, file: BinaryIO, path: Path, model: str) -> dict[str, Any]:
        start = file.read(16)
        if start[:8] != MAGIC or len(start) < 16:
            raise BundleError(f"{path} is no prompt cache of edgeinfer.")
        size = struct.unpack("<Q", start[8:])[0]
        try:
            header = json.loads(file.read(size) if size <= MAX_HEADER_BYTES else b"")
            tokens, _ = header["tokens"], header["sha256"]
            good = isinstance(tokens, list) and all(type(t) is int and t >= 0 for t in tokens)
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            raise _damaged(path)
        if {k: header.get(k) for k in self._header(model)} != self._header(model):
            raise BundleError(
                f"The prompt cache {path} was saved by another model or with another --kv; delete it or give another "
                "file."
            )
        if len(tokens) > (ctx := self.plan.request.ctx):
            raise BundleError(f"The prompt cache {path} holds {len(tokens)} tokens and the context {ctx}; raise --ctx.")
        return dict(header)


def _start_digest(header: dict[str, Any]) -> Any:
    """A checksum that has seen the header; the blocks come next."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode())


def _damaged(path: Path) -> BundleError:
    return BundleError(f"The prompt cache {path} is damaged or cut short; delete it.")
