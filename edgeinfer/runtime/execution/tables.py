"""The tables that ctx points to: tokens, sequences with their blocks, wanted outputs; written before each pass."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.kernels import abi
from edgeinfer.runner import DECODE, Segment, Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOKEN, _ENTRY = struct.Struct("=3q2i4q"), struct.Struct("=5q")
_ID, _SEQUENCE, _POSITION, _MASK, _ROW, _BASE, _ROLE = (offset // 8 for offset in (
    abi.TOKEN_ID, abi.TOKEN_SEQUENCE, abi.TOKEN_POSITION, abi.TOKEN_MASK, abi.TOKEN_ROW, abi.TOKEN_BASE,
    abi.TOKEN_ROLE))
EVERYTHING = -1
"""The mask of a token that sees every row up to its own."""


class Tables:
    """Memory for the description of one forward pass.

    Parameters
    ----------
    tokens : int
        Most tokens of a forward pass.
    sequences : int
        Most sequences of a forward pass.
    slot_bytes : int
        Bytes of a slot of recurrent state.
    """

    def __init__(self, tokens: int, sequences: int, slot_bytes: int = 0):
        self._slot_bytes = slot_bytes
        self.tokens = np.zeros((tokens, abi.TOKEN_BYTES // 8), np.int64)
        self.sequences = np.zeros((sequences, abi.SEQUENCE_BYTES // 8), np.int64)
        self.outputs, self.sample_specs = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        self.steps = np.zeros((sequences, abi.MAX_STEPS), np.int64)
        self._token_bytes = self.tokens.data.cast("B")
        self._sequence_bytes = self.sequences.data.cast("B")
        self._output_words, self._sample_words = self.outputs.data, self.sample_specs.data
        self._counting = np.arange(tokens)

    def write(self, segments: Items[Segment], offset: int = 0,
              rows: NDArray[np.int64] | None = None) -> tuple[int, int, bool]:
        """Describe one pass, of tokens `offset` rows after the ends of their sequences, or of one segment whose tokens
        are the `rows` after its end, ascending.

        Tokens in decode role are after the others, rows of logits as the segments do.

        Returns
        -------
        tokens, outputs : int
            How many there are of each.
        sampled : bool
            Whether an output has a sample spec.
        """
        n = n_outputs = 0
        sampled, starts = False, []
        ordered = decoded_last(segments)
        for number, (sequence, ids, *_) in enumerate(ordered):
            self._list(number, sequence, n, len(ids))
            starts.append(n)
            n += len(ids)
        if ordered is not segments:
            of = {id(segment.sequence): start for segment, start in zip(ordered, starts, strict=True)}
            starts = [of[id(segment.sequence)] for segment in segments]
        for (_, _, outputs, _, _, sample_specs, _), start in zip(segments, starts, strict=True):
            for output, spec in zip(outputs, sample_specs or repeat(0), strict=False):
                self._output_words[n_outputs], self._sample_words[n_outputs] = start + output, spec
                sampled = sampled or spec != 0
                n_outputs += 1
        if n == len(segments):
            self._write_single(ordered, offset if rows is None else int(rows[0]))
        else:
            self._write_many(ordered, offset, n)
            if rows is not None:
                self._set_rows(segments[0].sequence, rows)
        return n, n_outputs, sampled

    def chosen(self, sequences: int, further: int, left: int) -> list[list[int]]:
        """Return the tokens that each sequence gained in a pass of several steps, `further` of which were allowed."""
        return [self.steps[number, further:left:-1].tolist() for number in range(sequences)]

    def _list(self, number: int, sequence: Sequence, first: int, tokens: int) -> None:
        """Write the entry of a sequence with some tokens of the pass, and the blocks that its tables do not have yet.
        """
        listed, blocks = sequence.listed, sequence.blocks
        if listed < len(blocks):
            sequence.table[listed : len(blocks)] = blocks[listed:]
            sequence.listed = len(blocks)
        address, recent = sequence.address, sequence.recent
        if recent is not None:
            address = recent.address
            if (listed := recent.listed) < len(recent.blocks):
                recent.table[listed : len(recent.blocks)] = [max(block, 0) for block in recent.blocks[listed:]]
                recent.listed = len(recent.blocks)
        slot = sequence.state.blocks[0] * self._slot_bytes if sequence.state else 0
        _ENTRY.pack_into(self._sequence_bytes, abi.SEQUENCE_BYTES * number, sequence.address, address, slot, first,
                         tokens)

    def _write_single(self, segments: Items[Segment], offset: int) -> None:
        """Describe one token of each sequence, without a temporary array."""
        for number, (sequence, ids, _, role, *_) in enumerate(segments):
            row = len(sequence.tokens) + offset
            block, within = divmod(row, abi.BLOCK_TOKENS)
            slot = recent = sequence.blocks[block] * abi.BLOCK_TOKENS + within
            if sequence.recent is not None:
                recent = sequence.recent.blocks[block] * abi.BLOCK_TOKENS + within
            _TOKEN.pack_into(self._token_bytes, abi.TOKEN_BYTES * number, ids[0], number, row, slot, recent, EVERYTHING,
                             row, row, role)

    def _write_many(self, segments: Items[Segment], offset: int, n: int) -> None:
        table, counts = self.tokens[:n], [len(segment.ids) for segment in segments]
        starts = list(accumulate(counts, initial=0))
        bases = [len(segment.sequence.tokens) + offset for segment in segments]
        of_segment = np.array([range(len(segments)), [segment.role for segment in segments], bases, starts[:-1]])
        table[:, _SEQUENCE], table[:, _ROLE], base, start = np.repeat(of_segment, counts, axis=1)
        rows = base + (self._counting[:n] - start)
        table[:, _ID] = np.fromiter(chain.from_iterable(segment.ids for segment in segments), np.int64, n)
        table[:, _BASE], table[:, _ROW], table[:, _POSITION], table[:, _MASK] = base, rows, rows, EVERYTHING
        for segment, first, last in zip(segments, starts, starts[1:], strict=False):
            self._set_slots(segment.sequence, rows[first:last], first)
            if segment.parents is not None:
                _write_tree(table[first:last], segment.parents)

    def _set_rows(self, sequence: Sequence, offsets: NDArray[np.int64]) -> None:
        """Let the tokens of a chain be other rows after the end of its sequence than the next ones."""
        table, rows = self.tokens[: len(offsets)], len(sequence.tokens) + offsets
        table[:, _ROW] = table[:, _POSITION] = rows
        self._set_slots(sequence, rows, 0)

    def _set_slots(self, sequence: Sequence, rows: NDArray[np.int64], first: int) -> None:
        """Write where rows of a sequence are stored, which are those of the tokens from the first on."""
        blocks, within = rows // abi.BLOCK_TOKENS, rows % abi.BLOCK_TOKENS
        slots, recent = self.tokens.view(np.int32)[first : first + len(rows), abi.TOKEN_SLOT // 4 :], sequence.recent
        for which, table in enumerate((sequence.table, sequence.table if recent is None else recent.table)):
            slots[:, which] = table[blocks] * abi.BLOCK_TOKENS + within


def decoded_last(segments: Items[Segment]) -> Items[Segment]:
    """Return the segments with those in decode role last: the order of their tokens in the table."""
    if len(segments) == 1 or len({segment.role for segment in segments}) == 1:
        return segments
    return sorted(segments, key=lambda segment: segment.role == DECODE)


def _write_tree(rows: NDArray[np.int64], parents: Items[int]) -> None:
    """Give the tokens of a tree their positions and masks; a tree that is a chain is described like one."""
    if all(parent == i - 1 for i, parent in enumerate(parents)):
        return
    masks: list[int] = []
    depths: list[int] = []
    for i, parent in enumerate(parents):
        masks.append(1 << i | (masks[parent] if parent >= 0 else 0))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    rows[:, _MASK] = np.array(masks, np.uint64).view(np.int64)
    rows[:, _POSITION] = rows[:, _BASE] + depths
