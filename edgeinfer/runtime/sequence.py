"""Sequences over the KV pool: block tables, copy-on-write, truncation, and prompt caches on disk."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.block_tables import BlockTables
from edgeinfer.checks import shown
from edgeinfer.errors import BundleError, ClosedError, DestinationError, RequestError
from edgeinfer.files import open_plain, replacement
from edgeinfer.graph import KvAccess
from edgeinfer.json_text import parse_json
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import BlockPool, MemoryPlan
from edgeinfer.runner import Sequence

from .kv_planes import planes_of

MAGIC = b"EDGEKV01"
MAX_HEADER_BYTES = 64 << 20
LAYOUT = 2
"""How prompt caches hold K and V: 1 block by block, with the parts of all heads; 2 plane by plane."""
PIECE_BYTES = 1 << 18
"""Bytes by which a prompt cache is read and written at most, if that is a block of a head."""


class KVCache(BlockTables):
    """The KV region and who holds which block of it.

    Parameters
    ----------
    plan : MemoryPlan
    region : uint8 array
        Memory of the region ``kv``.
    stores : of KvAccess
        What each layer of `plan.kv_layers` stores, in that order.
    """

    def __init__(self, plan: MemoryPlan, region: NDArray[np.uint8], stores: Iterable[KvAccess]):
        super().__init__(BlockPool(plan.kv_blocks))
        self.plan = plan
        self.planes = planes_of(plan, region, stores)
        stored = plan.holes
        self._holes = region[stored.offset :][: stored.nbytes].reshape(-1, plan.kv_blocks, abi.BLOCK_TOKENS) \
            if stored else np.zeros((0, plan.kv_blocks, abi.BLOCK_TOKENS), np.uint8)
        """What each stage but the first lacks: (stages, blocks, rows of a block)."""
        flags = self._holes[:, None]
        self._by_block = [*(plane for planes in self.planes for plane in planes.arrays), flags]
        """All that belongs to a block: each (layers or stages, KV heads or 1, blocks, bytes)."""
        self._by_row = [part for planes in self.planes for part in planes.by_row()]
        self._by_row.append(flags.reshape(*flags.shape[:3], abi.BLOCK_TOKENS // 4, 4))
        self._written = bytearray(plan.kv_blocks)

    def new(self) -> Sequence:
        """Return an empty sequence, with a table that kernels read."""
        sequence = super().new()
        sequence.table = np.zeros(-(-self.plan.request.ctx // abi.BLOCK_TOKENS), np.int32)
        sequence.address = sequence.table.ctypes.data
        return sequence

    def take(self) -> int:
        """A block of one's own, which holds nothing that overflowed: a weight of 0 times NaN is NaN."""
        block = super().take()
        if self._written[block]:
            for plane in self._by_block:
                plane[:, :, block] = 0
        self._written[block] = 1
        return block

    def copy(self, source: int, target: int) -> None:
        """Copy K and V of a block to another, in all layers."""
        for plane in self._by_block:
            plane[:, :, target] = plane[:, :, source]

    def clear(self, block: int, first: int) -> None:
        """Zero the rows of a block from `first` on."""
        rows = np.arange(first, abi.BLOCK_TOKENS)
        for part in self._by_row:
            part[:, :, block, ..., rows // 4, rows % 4] = 0

    def keep(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """Of the tokens behind the first n keep those of a path, and move their rows together; see `Runner.keep`."""
        self.check_own(sequence)
        n = len(sequence.tokens) - n_before
        if n_before < 0 or n < 0 or any(not low < high < n for low, high in pairwise((-1, *path))):
            raise RequestError(f"Tokens {shown(path)} behind the first {n_before} of {len(sequence.tokens)} cannot be "
                               "kept; count a path from 0, each token behind the one before.")
        still = next((i for i, node in enumerate(path) if node != i), len(path))
        start = n_before + still
        if still == len(path):
            return self.truncate(sequence, start)
        source = n_before + np.array(path[still:], np.int64)
        target = start + np.arange(len(source))
        for number in sorted(set((target // abi.BLOCK_TOKENS).tolist())):
            self.own(sequence, number)
        tokens = [sequence.tokens[row] for row in source.tolist()]
        if sequence.decoded is not None and sequence.decoded > start:
            sequence.decoded = start + int(np.searchsorted(source, sequence.decoded))
        sequence.cut = True
        del sequence.tokens[start:]  # an interruption leaves a sequence that ends before what moves
        self._move(np.array(sequence.blocks), source, target)
        sequence.tokens += tokens
        return self.truncate(sequence, len(sequence.tokens))

    def _move(self, blocks: NDArray[np.int64], source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy K and V of rows of a sequence to other rows, in all layers."""
        (to, here), (since, there) = ((blocks[rows // abi.BLOCK_TOKENS], rows % abi.BLOCK_TOKENS)
                                      for rows in (target, source))
        for part in self._by_row:
            part[:, :, to, ..., here // 4, here % 4] = part[:, :, since, ..., there // 4, there % 4]

    def close(self) -> None:
        """Let go of the memory."""
        self.planes, self._by_row, self._by_block = [], [], []
        self._holes = self._holes[:0]

    # -- tokens that went through a part of the layers ---------------------------------------------------------------

    def lacking(self, sequence: Sequence, n_tokens: int) -> NDArray[np.bool_]:
        """What each stage but the first lacks of the first n tokens: (stages, n)."""
        flags = self._holes[:, sequence.blocks].reshape(len(self._holes), abi.BLOCK_TOKENS * len(sequence.blocks))
        return flags[:, :n_tokens] != 0

    def leave_out(self, sequence: Sequence, stage: int, rows: NDArray[np.int64]) -> None:
        """Take note that a stage and those behind it lack rows of a sequence, whose blocks are its own."""
        blocks = np.array(sequence.blocks)[rows // abi.BLOCK_TOKENS]
        self._holes[stage - 1 :, blocks, rows % abi.BLOCK_TOKENS] = 1

    def keys(self, sequence: Sequence, layer: int, head: int) -> NDArray[np.float32]:
        """K of a head in all rows of the sequence's blocks: (rows, head_dim)."""
        planes = next(planes for planes in self.planes if layer in planes.layers)
        return planes.keys(layer, head, sequence.blocks)

    # -- prompt caches -----------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, path: Path, model: str) -> None:
        """Write tokens and blocks: magic, header length, JSON header, then of each plane, layer and KV head the blocks.

        Raises `DestinationError` if the file cannot be written; nothing is left behind, and an older file stays as it
        was.
        """
        self.check_own(sequence)
        header = self._header(model) | {"tokens": sequence.tokens} | self._pruned(sequence, len(sequence))
        pruned = "lazy" in header
        digest, held = _start_digest(header), sequence.blocks[: -(-len(sequence) // abi.BLOCK_TOKENS)]  # more: reserved
        for plane, blocks in self._pieces(held, pruned):
            digest.update(plane[blocks].data)
        text = json.dumps(header | {"sha256": digest.hexdigest()}).encode()
        try:
            with replacement(path) as file:
                file.write(MAGIC + struct.pack("<Q", len(text)) + text)
                for plane, blocks in self._pieces(held, pruned):
                    file.write(plane[blocks].data)
        except OSError as error:
            raise DestinationError(f"Cannot write the prompt cache {path}: {error.strerror or error}.") from None

    def load(self, path: Path, prompts: str, decoded: str) -> Sequence:
        """Read a sequence saved by the same model with the same KV type.

        The model has two names: what it makes of prompts alone, and of tokens that were decoded.

        Raises `BundleError` if the file cannot be read, is damaged, belongs to another model or KV type, or is longer
        than the context. Raises `RequestError` if the pool has no room for it.
        """
        sequence = self.new()
        try:
            with open_plain(path) as file:
                header = self._read_header(file, path, (prompts, decoded))
                self.extend(sequence, len(header["tokens"]))
                pruned = {key: header[key] for key in ("lazy", "present") if key in header}
                if self._read_blocks(file, sequence, header) != header["sha256"] \
                        or self._pruned(sequence, len(header["tokens"])) != pruned:
                    raise _damaged(path)
        except OSError as error:
            self.trim(sequence)
            raise BundleError(f"Cannot read the prompt cache {path}: {error.strerror or error}.") from None
        except BaseException:
            self.trim(sequence)
            raise
        sequence.cut = True  # whoever saved it may have cut it
        sequence.tokens, sequence.decoded = header["tokens"], None if header["model"] == prompts else 0
        return sequence

    def _read_blocks(self, file: io.BufferedReader, sequence: Sequence, header: dict[str, Any]) -> str:
        """Read piece by piece into the pool and return the checksum; empty if the length is wrong."""
        digest = _start_digest({key: value for key, value in header.items() if key != "sha256"})
        for plane, blocks in self._pieces(sequence.blocks, "lazy" in header):
            piece = np.empty((len(blocks), plane.shape[1]), np.uint8)
            if file.readinto(piece.data) != piece.nbytes:
                return ""
            digest.update(piece.data)
            plane[blocks] = piece
        return "" if file.read(1) else str(digest.hexdigest())

    def _pieces(self, held: list[int], pruned: bool = False) -> Iterator[tuple[NDArray[np.uint8], list[int]]]:
        """What a prompt cache has one behind the other: of a head of a plane some of a sequence's blocks.

        Behind K and V comes what the stages lack, where prompts were `pruned`.
        """
        for plane in self._by_block if pruned else self._by_block[:-1]:
            n = max(1, PIECE_BYTES // plane.shape[-1])
            for head in (head for layer in plane for head in layer):
                for i in range(0, len(held), n):
                    yield head, held[i : i + n]

    def _pruned(self, sequence: Sequence, n_tokens: int) -> dict[str, Any]:
        """What a header says of tokens that later layers lack, if there are any: the schedule, and how many each stage
        has. Empty too where what the flags say cannot be: what a stage lacks those behind it lack as well.
        """
        lacking = self.lacking(sequence, n_tokens)
        if not lacking.any() or (lacking[:-1] > lacking[1:]).any():
            return {}
        return {"lazy": str(self.plan.request.lazy), "present": (~lacking).sum(axis=1).tolist()}

    def _header(self, model: str) -> dict[str, Any]:
        if not self._by_block:
            raise ClosedError("The model was closed; open it again.")
        return {"model": model, "kv": self.plan.request.kv, "block_bytes": self.plan.kv_block_bytes,
                "layers": len(self.plan.kv_layers), "layout": LAYOUT}

    def _read_header(self, file: io.BufferedReader, path: Path, models: tuple[str, ...]) -> dict[str, Any]:
        start = file.read(16)
        if start[:8] != MAGIC or len(start) < 16:
            raise BundleError(f"{path} is no prompt cache of edgeinfer.")
        size = struct.unpack("<Q", start[8:])[0]
        try:
            header = parse_json(file.read(size) if size <= MAX_HEADER_BYTES else b"")
            tokens, _ = header["tokens"], header["sha256"]
            good = isinstance(tokens, list) and all(type(t) is int and t >= 0 for t in tokens)
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise _damaged(path)
        if not any(header.items() >= self._header(model).items() for model in models):
            raise BundleError(
                f"The prompt cache {path} was saved by another model or version of edgeinfer, or with another --kv, "
                "--recipe or instruction set; give another file."
            )
        if header.get("lazy", own := str(self.plan.request.lazy)) != own:
            raise BundleError(f"The prompt cache {path} was saved with {shown(header['lazy'])} as --lazy, and lacks K "
                              "and V that this run needs; give the same schedule, or another file.")
        if len(tokens) > (ctx := self.plan.request.ctx):
            raise BundleError(f"The prompt cache {path} holds {len(tokens)} tokens and the context {ctx}; raise --ctx.")
        return dict(header)


def _start_digest(header: dict[str, Any]) -> Any:
    """A checksum that has seen the header; the blocks come next."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode())


def _damaged(path: Path) -> BundleError:
    return BundleError(f"The prompt cache {path} is damaged or cut short; give another file.")
