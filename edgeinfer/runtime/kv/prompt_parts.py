"""A prompt's K and V in parts, which go to another process while the rest of the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import BundleError
from edgeinfer.kernels import abi
from edgeinfer.runner import GONE, BlockForm, Sequence
from edgeinfer.runner.prompt_parts import ALL, SIZE, STATE, WINDOW, blocks_of_tokens, encoded, ranges

from .cache_file import origin
from .sequence import KVCache

Buffer = bytes | memoryview


class PromptParts:
    """Reads and writes parts of the sequences of one KV cache.

    A part is the size of its header, the header in JSON, and of each layer, plane and KV head the blocks. Layers with a
    window and recurrent state come when the prompt is complete: only then are their final rows known.

    Parameters
    ----------
    kv : KVCache
    model : str
        Identity that the K and V depend on.
    elsewhere : str
        Identity of K and V that another executor computes for this cache; empty if none may.
    """

    def __init__(self, kv: KVCache, model: str, elsewhere: str = ""):
        self._kv, self.elsewhere = kv, elsewhere
        self._origin = origin(kv, model) | {"windows": kv.recent is not None}

    @property
    def form(self) -> BlockForm:
        """Blocks as another executor has to make them."""
        windowed = self._kv.plan.windowed if self._kv.recent else None
        return BlockForm(**{**self._origin, "model": self.elsewhere}, window=windowed.window if windowed else 0,
                         windowed=windowed.layers if windowed else ())

    def read(self, sequence: Sequence, first: int, complete: bool) -> Iterator[bytes]:
        """Yield the parts of a sequence from block `first` on: its full blocks, or all that it has if it is complete.
        """
        self._kv.check_own(sequence)
        n = len(sequence)
        end = blocks_of_tokens(n, complete)
        parts = ranges(ALL, first, end, self._block_bytes(ALL)) or [(ALL, end, end)] * complete
        if complete and sequence.recent:
            parts += ranges(WINDOW, sequence.recent.gone, end, self._block_bytes(WINDOW))
        if complete and sequence.state and n:
            parts.append((STATE, 0, 0))
        for number, (kind, begin, stop) in enumerate(parts):
            header: dict[str, Any] = self._origin | {"kind": kind, "first": begin, "end": stop}
            if sequence.recent:
                header["gone"] = sequence.recent.gone
            if sequence.state:
                header["base"] = sequence.state.base
            last = {"last": complete and number == len(parts) - 1}
            yield encoded(header | last, self._read(sequence, kind, begin, stop))

    def write(self, sequence: Sequence, part: Buffer, ids: Items[int]) -> Iterator[None]:
        """Write a part into blocks of a sequence, and stop after each plane, so that the caller can do other things.

        The sequence has no tokens until the last part is written; then it has `ids`.

        Raises `BundleError` if the part is damaged, or not of the same model, KV type and executor as those before;
        `RequestError` if no block is free.
        """
        header, data = self._parsed(part, -(-len(ids) // abi.BLOCK_TOKENS))
        kind, first, end = header["kind"], header["first"], header["end"]
        unlike = header["model"] == self.elsewhere
        if sequence.blocks and unlike != sequence.unlike:  # earlier parts have blocks
            raise BundleError("KV blocks of one prompt came from two executors; ask again.")
        sequence.unlike = unlike
        if kind == STATE:
            self._begin_state(sequence, header, len(ids))
        blocks = self._room(sequence, header, -(-len(ids) // abi.BLOCK_TOKENS))[first:end]
        start, kept = 0, [i for i, block in enumerate(blocks) if block != GONE]
        places = _slice([blocks[i] for i in kept])
        for plane in self._planes(sequence, kind):
            shape = len(plane), len(blocks), plane.shape[-1]
            size = shape[0] * shape[1] * shape[2]
            given = data[start : start + size].reshape(shape)
            plane[:, places] = given if len(kept) == len(blocks) else given[:, kept]
            start += size
            yield
        if header["last"]:
            sequence.tokens, sequence.cut = list(ids), True

    def _begin_state(self, sequence: Sequence, header: dict[str, Any], n_tokens: int) -> None:
        if self._kv.states is None or not 0 <= n_tokens - header["base"] <= abi.JOURNAL_TOKENS:
            raise _damaged()
        self._kv.states.begin(sequence, 1)
        sequence.state.base = header["base"]

    def _room(self, sequence: Sequence, header: dict[str, Any], n_blocks: int) -> list[int]:
        """Return the sequence's blocks of the kind of a part, with those that it brings."""
        if header["kind"] == STATE:
            return list(sequence.state.blocks)
        if header["kind"] == WINDOW:
            recent, pool = sequence.recent, self._kv.recent
            assert recent is not None and pool is not None
            if not recent.blocks:
                pool.place(sequence, max(header["gone"], n_blocks - pool.windowed.sequence_blocks), n_blocks)
            return recent.blocks
        if header["first"] > len(sequence.blocks):
            raise _damaged()
        while len(sequence.blocks) < header["end"]:
            sequence.blocks.append(self._kv.take())
        return sequence.blocks

    def _parsed(self, part: Buffer, n_blocks: int) -> tuple[dict[str, Any], NDArray[np.uint8]]:
        """Return the header of a part and the data after it, whose size is that of its planes."""
        size = SIZE.unpack_from(part)[0] if len(part) >= SIZE.size else 0
        start = SIZE.size + size
        try:
            header = parse_json(bytes(part[SIZE.size : start]))
            found = {name: header[name] for name in self._origin}
            kind, first, end, last = (header[name] for name in ("kind", "first", "end", "last"))
            numbers = [first, end, header.get("gone", 0), header.get("base", 0)]
        except (ValueError, KeyError, TypeError):
            raise _damaged() from None
        if found != self._origin and (not self.elsewhere or found != self._origin | {"model": self.elsewhere}):
            raise BundleError("KV blocks came from another model or version of edgeinfer, or from one with another "
                              "--kv, --recipe, --ctx or instruction set; start all replicas with the same options.")
        if not all(type(one) is int and one >= 0 for one in numbers) or not first <= end <= n_blocks \
                or kind not in (ALL, WINDOW, STATE) or type(last) is not bool \
                or (kind == WINDOW and self._kv.recent is None):
            raise _damaged()
        data = np.frombuffer(part, np.uint8, offset=start)
        if kind == STATE:
            end = first + 1
        expected = self._block_bytes(kind) * (end - first)
        if data.size != expected:
            raise _damaged()
        return header | {"end": end}, data

    def _read(self, sequence: Sequence, kind: str, first: int, end: int) -> Iterator[memoryview]:
        if kind == STATE and sequence.state.blocks[0] == GONE:
            yield memoryview(bytes(self._kv.state_memory.shape[1]))
            return
        table: Any = sequence.state if kind == STATE else sequence.recent if kind == WINDOW else sequence
        blocks = table.blocks[:1] if kind == STATE else table.blocks[first:end]
        for plane in self._planes(sequence, kind):
            yield np.ascontiguousarray(plane[:, _slice(blocks)]).data

    def _planes(self, sequence: Sequence | None, kind: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the memory of a part's blocks, layer by layer: (KV heads, blocks, bytes), or the slots of the state."""
        if kind == STATE:
            yield self._kv.state_memory[None]
            return
        for planes in self._kv.planes:
            for number, layer in enumerate(planes.layers):
                if (layer in self._kv.window_layers) == (kind == WINDOW):
                    yield from (array[number] for array in planes.arrays)

    def _block_bytes(self, kind: str) -> int:
        return sum(plane[:, 0].size for plane in self._planes(None, kind))


def _slice(blocks: list[int]) -> slice | list[int]:
    """Return blocks that follow each other as a slice, which is copied faster."""
    if blocks and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0], blocks[0] + len(blocks))
    return blocks


def _damaged() -> BundleError:
    return BundleError("KV blocks of a prompt came damaged or in the wrong order; ask again.")
