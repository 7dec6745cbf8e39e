"""The KV cache in pages, which sequences take as they grow and share where they begin alike; a pass is one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runner import Segment
from edgeinfer.runner.block_tables import BlockTables

from .calls import Call, Calls, Inputs
from .sessions import Sessions
from .slabs import Layout, Slabs
from .step import step_size
from .topk_sampling import sampled

LAYOUT = Layout("paged", ("key_cache.{}", "value_cache.{}"), ("key_cache_out.{}", "value_cache_out.{}"),
                lambda positions, heads: (positions, heads.kv, heads.stored_dim))


class Pages(BlockTables):
    """Sequences with block tables over the pages of a device.

    Parameters
    ----------
    pages, positions : how many, and of how many positions each
    copy : callable
        Copies one page to another.
    """

    def __init__(self, pages: int, positions: int, copy: Callable[[int, int], None]):
        super().__init__(pages, positions)
        self._copy = copy

    def copy(self, source: int, target: int) -> None:
        """Copy a page within the memory of its device."""
        self._copy(source, target)

    def clear(self, block: int, first: int) -> None:
        """Nothing: attention reads no row after a sequence's end."""


class PageCalls(Calls):
    """Prompts, draft tokens and single tokens of all sequences go through together, as one flat list of tokens."""

    def __init__(self, sessions: Sessions, slabs: Slabs, outputs: int, vocab_size: int, ctx: int, sequences: int):
        super().__init__(sessions, slabs, outputs, vocab_size)
        self._most, self._sequences = -(-ctx // slabs.positions), sequences
        self._spare = slabs.blocks - 1
        """The last page, which no sequence holds: idle rows of a step write there."""

    def of(self, segments: Items[Segment]) -> Iterator[Call]:
        """Yield the one call of a forward pass."""
        counts = [len(segment.ids) for segment in segments]
        ends = np.cumsum([0, *counts]).astype(np.int32)
        past = np.array([len(segment.sequence) for segment in segments], np.int32)
        rows = [int(start) + row for start, segment in zip(ends, segments, strict=False) for row in segment.outputs]
        targets, width = list(range(len(rows))), max(len(segment.sequence.blocks) for segment in segments)
        ids = np.array([token for segment in segments for token in segment.ids], np.int64)
        inputs: Inputs = {"input_ids": ids, "past_seqlens": past}
        if max(counts) > 1:
            fixed = _fixed(ends, max(counts), int((past + counts).max()))
            yield self._several({**inputs, **fixed, "block_table": _table(segments, width)}, rows, targets)
            return
        width, size = table_width(width, self._most), step_size(len(segments), self._sequences)
        idle = size - len(segments)
        inputs = {name: np.pad(values, (0, idle)) for name, values in inputs.items()}
        inputs["block_table"] = np.pad(_table(segments, width), ((0, idle), (0, 0)), constant_values=self._spare)

        def bound() -> Inputs:
            ends = np.arange(size + 1, dtype=np.int32)
            return {**inputs, **_fixed(ends, 1, width * self.slabs.positions), "output_rows": np.arange(size)}

        sample_specs = [one for segment in segments for one in sampled(segment)]
        yield self._one_each((size, width), inputs, rows, targets, sample_specs, bound)


def table_width(pages: int, most: int) -> int:
    """Return how many pages the tables of a step have where a sequence holds this many: a power of two, or `most`, so
    that few graphs serve all lengths."""
    return min(1 << (pages - 1).bit_length(), most)


def table_widths(most: int) -> int:
    """Return how many widths `table_width` has."""
    return 1 + (most - 1).bit_length()


def _table(segments: Items[Segment], width: int) -> NDArray[np.int32]:
    """Pages of each sequence; entries after them are not read, and have to be some page."""
    table = np.zeros((len(segments), width), np.int32)
    for row, segment in zip(table, segments, strict=True):
        row[: len(segment.sequence.blocks)] = segment.sequence.blocks
    return table


def _fixed(ends: NDArray[np.int32], tokens: int, positions: int) -> Inputs:
    """Return the inputs that are equal in all steps of a graph, with bounds that hold for each step; no minimum number
    of positions is given.
    """
    return {"cumulative_sequence_length": ends, "attention_metadata": np.array([tokens, positions, 0], np.int32)}
