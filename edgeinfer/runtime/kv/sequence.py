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

from edgeinfer.base.files import open_plain, replacement
from edgeinfer.base.strict_json import parse_json
from edgeinfer.base.validation import shown
from edgeinfer.errors import BundleError, ClosedError, DestinationError, RequestError
from edgeinfer.graph import KvAccess
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import BlockPool, MemoryPlan
from edgeinfer.registry import each, technique
from edgeinfer.runner import GONE, Sequence, WindowTable
from edgeinfer.runner.block_tables import BlockTables
from edgeinfer.runner.window_blocks import WindowBlocks

from .block_memory import PoolMemory
from .planes import planes_of

MAGIC = b"EDGEKV01"
MAX_HEADER_BYTES = 64 << 20
LAYOUT = 3
"""Layout of K and V in prompt caches: 1 block by block, with the parts of all heads; 2 plane by plane; 3 layer by
layer, of layers with a window only the kept blocks.
"""
PRESENT = "present"
"""Key of a header: tokens that each stage has, where later layers lack some."""
PIECE_BYTES = 1 << 18
"""Bytes by which a prompt cache is read and written at most, if that is a block of a head."""


class KVCache(BlockTables):
    """The KV region and the ownership of its blocks.

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
        of = {access.layer: access for access in stores}
        self.planes = planes_of(plan, region, [of[layer] for layer in plan.kv_layers])
        windowed, stored = plan.windowed, plan.pruned
        self._pruned_mask = region[stored.offset :][: stored.nbytes].reshape(-1, plan.kv_blocks, abi.BLOCK_TOKENS) \
            if stored else np.zeros((0, plan.kv_blocks, abi.BLOCK_TOKENS), np.uint8)
        """Flags of the tokens that each stage but the first lacks: (stages, blocks, rows of a block)."""
        self._window_layers = frozenset(windowed.layers if windowed else ())
        whole = [each for each in self.planes if self._window_layers.isdisjoint(each.layers)]
        others = [each for each in self.planes if not self._window_layers.isdisjoint(each.layers)]
        self._memory = PoolMemory(whole, plan.kv_blocks, self._pruned_mask[:, None])
        self._window_memory = PoolMemory(others, windowed.blocks if windowed else 0)
        self.recent = WindowBlocks(windowed, self._window_memory, self._living) if windowed else None
        """Ownership of the blocks of layers with a window, if these have a pool of their own."""

    def new(self) -> Sequence:
        """Return an empty sequence, with tables that kernels read."""
        sequence, n = super().new(), -(-self.plan.request.ctx // abi.BLOCK_TOKENS)
        sequence.table = np.zeros(n, np.int32)
        sequence.address = sequence.table.ctypes.data
        if self.recent:
            table = np.zeros(n, np.int32)
            sequence.recent = WindowTable(table=table, address=table.ctypes.data)
        return sequence

    def take(self) -> int:
        """A block of one's own, which holds nothing that does harm."""
        block = super().take()
        self._memory.take(block)
        return block

    def copy(self, source: int, target: int) -> None:
        """Copy K and V of a block to another, in all layers that keep all."""
        self._memory.copy(source, target)

    def clear(self, block: int, first: int) -> None:
        """Zero the rows of a block from `first` on."""
        self._memory.clear(block, first)

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Make room for n more tokens, in all layers."""
        cut = sequence.cut
        super().extend(sequence, n_tokens)
        if self.recent:
            self.recent.extend(sequence, n_tokens, cut)

    def fits(self, sequences: Items[Sequence], n_tokens: int) -> bool:
        """Return whether `extend` finds blocks for n more tokens of each of several sequences."""
        return super().fits(sequences, n_tokens) and (not self.recent or self.recent.fits(sequences, n_tokens))

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with the same tokens that shares all blocks until one of the two writes."""
        copy = super().fork(sequence)
        if self.recent:
            self.recent.share(sequence, copy)
        return copy

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks past the last token that is there or reserved."""
        super().trim(sequence)
        if self.recent:
            self.recent.trim(sequence)

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n, if what they see is there."""
        self.check_own(sequence)
        if self.recent:
            self.recent.check(sequence, n_tokens)
        super().truncate(sequence, n_tokens)

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return how many of the first n tokens can be kept; see `Runner.can_truncate`."""
        return self.recent.can_truncate(sequence, n_tokens) if self.recent else n_tokens

    def accept(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """Of the tokens behind the first n keep those of a path, and move their rows together; see `Runner.accept`."""
        self.check_own(sequence)
        n = len(sequence.tokens) - n_before
        if n_before < 0 or n < 0 or any(not low < high < n for low, high in pairwise((-1, *path))):
            raise RequestError(f"Tokens {shown(path)} behind the first {n_before} of {len(sequence.tokens)} cannot be "
                               "kept; count a path from 0, each token behind the one before.")
        still = next((i for i, node in enumerate(path) if node != i), len(path))
        start = n_before + still
        if still == len(path):
            return self.truncate(sequence, start)
        if self.recent:
            self.recent.check(sequence, start)
        source = n_before + np.array(path[still:], np.int64)
        target = start + np.arange(len(source))
        for number in sorted(set((target // abi.BLOCK_TOKENS).tolist())):
            self.own(sequence, number)
            if self.recent:
                self.recent.own(sequence, number)
        tokens = [sequence.tokens[row] for row in source.tolist()]
        if sequence.decoded is not None and sequence.decoded > start:
            sequence.decoded = start + int(np.searchsorted(source, sequence.decoded))
        sequence.cut = True
        del sequence.tokens[start:]  # an interruption leaves a sequence that ends before what moves
        self._memory.move(np.array(sequence.blocks), source, target)
        if sequence.recent:
            self._window_memory.move(np.array(sequence.recent.blocks), source, target)
        sequence.tokens += tokens
        return self.truncate(sequence, len(sequence.tokens))

    def close(self) -> None:
        """Let go of the memory."""
        self.planes, self._pruned_mask = [], self._pruned_mask[:0]
        for memory in (self._memory, self._window_memory):
            memory.close()

    # -- tokens that went through a part of the layers ---------------------------------------------------------------

    def lacking(self, sequence: Sequence, n_tokens: int) -> NDArray[np.bool_]:
        """Return flags of which of the first n tokens each stage but the first lacks: (stages, n)."""
        flags = self._pruned_mask[:, sequence.blocks].reshape(len(self._pruned_mask), abi.BLOCK_TOKENS
                                                              * len(sequence.blocks))
        return flags[:, :n_tokens] != 0

    def leave_out(self, sequence: Sequence, stage: int, rows: NDArray[np.int64]) -> None:
        """Take note that a stage and those behind it lack rows of a sequence, whose blocks are its own."""
        blocks = np.array(sequence.blocks)[rows // abi.BLOCK_TOKENS]
        self._pruned_mask[stage - 1 :, blocks, rows % abi.BLOCK_TOKENS] = 1

    def keys(self, sequence: Sequence, layer: int, head: int) -> NDArray[np.float32]:
        """K of a head in all rows of the sequence's blocks: (rows, head_dim)."""
        planes = next(planes for planes in self.planes if layer in planes.layers)
        return planes.keys(layer, head, sequence.blocks)

    # -- prompt caches -----------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, path: Path, model: str) -> None:
        """Write tokens and blocks: magic, header length, JSON header, then of each layer, plane and KV head the blocks.

        Of layers with a window these are the ones that are left: the header says how many are gone before them.

        Raises `DestinationError` if the file cannot be written; nothing is left behind, and an older file stays as it
        was.
        """
        self.check_own(sequence)
        header = self._header(model) | {"tokens": sequence.tokens} | self._pruned(sequence, len(sequence))
        if sequence.recent and sequence.recent.gone:
            header["gone"] = sequence.recent.gone
        digest = _start_digest(header)
        for plane, blocks in self._pieces(sequence, header):
            digest.update(plane[blocks].data)
        text = json.dumps(header | {"sha256": digest.hexdigest()}).encode()
        try:
            with replacement(path) as file:
                file.write(MAGIC + struct.pack("<Q", len(text)) + text)
                for plane, blocks in self._pieces(sequence, header):
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
                self._make_room(sequence, header)
                pruned = {key: header[key] for key in (_pruner(header), PRESENT) if key in header}
                if self._read_blocks(file, sequence, header) != header["sha256"] \
                        or self._pruned(sequence, len(header["tokens"])) != pruned:
                    raise _damaged(path)
        except OSError as error:
            self.trim(sequence)
            raise BundleError(f"Cannot read the prompt cache {path}: {error.strerror or error}.") from None
        except BaseException:
            self.trim(sequence)
            raise
        sequence.cut = True  # it may have been truncated before it was saved
        sequence.tokens, sequence.decoded = header["tokens"], None if header["model"] == prompts else 0
        return sequence

    def _make_room(self, sequence: Sequence, header: dict[str, Any]) -> None:
        """Give a sequence the blocks of what a file has, as far as it may hold them here."""
        n_tokens = len(header["tokens"])
        super().extend(sequence, n_tokens)
        if self.recent:
            n_blocks = -(-n_tokens // abi.BLOCK_TOKENS)
            fewest = n_blocks - self.recent.windowed.sequence_blocks
            self.recent.place(sequence, max(header.get("gone", 0), fewest), n_blocks)

    def _read_blocks(self, file: io.BufferedReader, sequence: Sequence, header: dict[str, Any]) -> str:
        """Read piece by piece into the pool and return the checksum; empty if the length is wrong."""
        digest = _start_digest({key: value for key, value in header.items() if key != "sha256"})
        for plane, blocks in self._pieces(sequence, header):
            piece = np.empty((len(blocks), plane.shape[1]), np.uint8)
            if file.readinto(piece.data) != piece.nbytes:
                return ""
            digest.update(piece.data)
            first = blocks.count(GONE)  # more than a sequence keeps here
            plane[blocks[first:]] = piece[first:]
        return "" if file.read(1) else str(digest.hexdigest())

    def _pieces(self, sequence: Sequence, header: dict[str, Any]) -> Iterator[tuple[NDArray[np.uint8], list[int]]]:
        """Yield the arrays of a prompt cache in their order: of each head of a plane, some of the sequence's blocks.

        K and V are followed by the flags of pruned tokens, if prompts were pruned.
        """
        n_blocks = -(-len(header["tokens"]) // abi.BLOCK_TOKENS)  # more: reserved
        whole = recent = sequence.blocks[:n_blocks]
        if sequence.recent:
            recent = sequence.recent.blocks[header.get("gone", 0) : n_blocks]
        heads = [(layer, head) for planes in self.planes for plane in planes.arrays
                 for layer, of_layer in zip(planes.layers, plane, strict=True) for head in of_layer]
        parts = [(head, recent if layer in self._window_layers else whole)
                 for layer, head in sorted(heads, key=lambda each: each[0])]
        parts += [(stage, whole) for stage in self._pruned_mask] if _pruner(header) else []
        for head, held in parts:
            n = max(1, PIECE_BYTES // head.shape[-1])
            for i in range(0, len(held), n):
                yield head, held[i : i + n]

    def _pruned(self, sequence: Sequence, n_tokens: int) -> dict[str, Any]:
        """Return the header's fields on pruned tokens, if any: the schedule, and how many tokens each stage has.

        Also empty if the flags are inconsistent: later stages must lack what a stage lacks.
        """
        lacking = self.lacking(sequence, n_tokens)
        if not lacking.any() or (lacking[:-1] > lacking[1:]).any():
            return {}
        (name, settings), = self._pruning.items()
        return {name: settings, PRESENT: (~lacking).sum(axis=1).tolist()}

    @property
    def _pruning(self) -> dict[str, str]:
        """Settings of the technique that leaves tokens of prompts behind, by its name; empty if none does."""
        return {one.name: str(settings) for one, settings in each(self.plan.request.techniques)
                if one.boundaries(settings)}

    def _header(self, model: str) -> dict[str, Any]:
        if not self.planes:
            raise ClosedError("The model was closed; open it again.")
        return {"model": model, "kv": self.plan.request.kv, "block_bytes": self.plan.kv_block_bytes,
                "layers": len(self.plan.kv_layers), "layout": LAYOUT}

    def _read_header(self, file: io.BufferedReader, path: Path, models: tuple[str, ...]) -> dict[str, Any]:
        start = file.read(16)
        if start[:8] != MAGIC or len(start) < 16:
            raise BundleError(f"{path} is not a prompt cache of edgeinfer.")
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
                "--recipe, --ctx or instruction set; give another file."
            )
        if (name := _pruner(header)) and self._pruning.get(name) != header[name]:
            raise BundleError(f"The prompt cache {path} was saved with {shown(header[name])} as --{name}, and lacks K "
                              "and V that this run needs; give the same schedule, or another file.")
        self._check_gone(header, path)
        if len(tokens) > (ctx := self.plan.request.ctx):
            raise BundleError(f"The prompt cache {path} holds {len(tokens)} tokens and the context {ctx}; raise --ctx.")
        return dict(header)

    def _check_gone(self, header: dict[str, Any], path: Path) -> None:
        """Refuse a file that lacks more of layers with a window than can be, or than this run does."""
        if (gone := header.get("gone")) is None:
            return
        if self.recent is None:
            raise BundleError(f"The prompt cache {path} has of layers with a window what they see alone, and this run "
                              "keeps all tokens in all layers (a short --ctx or --lazy); give the --ctx that it was "
                              "saved with, or another file.")
        seen = len(header["tokens"]) - self.recent.windowed.window + 1
        if type(gone) is not int or not 0 < gone * abi.BLOCK_TOKENS <= seen:
            raise _damaged(path)


def _pruner(header: dict[str, Any]) -> str:
    """Return the technique that left tokens behind in a prompt cache, which is a key of its header; empty for none."""
    if PRESENT not in header:
        return ""
    return next((key for key in header if technique(key)), "")


def _start_digest(header: dict[str, Any]) -> Any:
    """A checksum that has seen the header; the blocks come next."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode())


def _damaged(path: Path) -> BundleError:
    return BundleError(f"The prompt cache {path} is damaged or cut short; give another file.")
