"""The KV cache in slots, one for each sequence with room for a whole context; ragged decodes in one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from functools import partial

import numpy as np

from edgeinfer.errors import RequestError
from edgeinfer.runner import Segment, Sequence
from edgeinfer.runner.block_tables import Sequences

from .calls import Call, Calls, Inputs
from .sessions import Sessions
from .slabs import Layout, Slabs
from .step import step_size
from .topk_sampling import sampled

LAYOUT = Layout("gqa", ("past_key_values.{}.key", "past_key_values.{}.value"), ("present.{}.key", "present.{}.value"),
                lambda positions, heads: (heads.kv, positions, heads.stored_dim))
_Single = tuple[int, Segment, list[int]]
"""Slot, a segment of one token, and the rows of the forward pass that its logits become."""


class SlotPool:
    """Assignment of slots to sequences."""

    def __init__(self, slots: int):
        self._owners: list[weakref.ref[Sequence] | None] = [None] * slots

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, slot: int) -> Sequence | None:
        """Return the sequence that holds a slot."""
        found = self._owners[slot]
        return found() if found else None

    @property
    def n_free(self) -> int:
        """Free slots, including those of sequences that were deleted."""
        return sum(self.owner(slot) is None for slot in range(len(self)))

    def take(self, sequence: Sequence) -> int:
        """The lowest free slot; raises `RequestError` if all are held."""
        free = next((slot for slot in range(len(self)) if self.owner(slot) is None), None)
        if free is None:
            raise RequestError(f"All {len(self)} slots for sequences are held; release one, or open the model with a "
                               "larger max_sequences.")
        self._owners[free] = weakref.ref(sequence)
        return free

    def drop(self, slot: int) -> None:
        """Free the slot."""
        self._owners[slot] = None


class Slots(Sequences):
    """Sequences that hold a slot each, unless they have no tokens.

    Parameters
    ----------
    slots : int
    copy : callable
        Copies one slot to another.
    recurrent : bool
        True if slots hold states, which include every token.
    """

    def __init__(self, slots: int, copy: Callable[[int, int], None], recurrent: bool = False):
        super().__init__()
        self.pool, self._copy, self._recurrent = SlotPool(slots), copy, recurrent

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Take a slot for a sequence that has none yet; raises `RequestError` if all are held."""
        if not sequence.blocks:
            sequence.blocks.append(self.pool.take(sequence))

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Slots have room for a whole context: return whether those that have none yet find one."""
        return sum(not sequence.blocks for sequence, _ in wanted) <= self.pool.n_free

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return the most of the first n tokens that a sequence can be cut to: none of them if states go on."""
        return 0 if self._recurrent and n_tokens < len(sequence) else n_tokens

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n; raises `RequestError` if states include the others."""
        if self._recurrent and 0 < n_tokens < len(sequence):
            raise RequestError(f"A sequence of {len(sequence)} tokens cannot be cut to {n_tokens}: its recurrent state "
                               "has continued, and no earlier one is kept on this device. Cut it to 0, or run its "
                               "beginning again (rollback).")
        super().truncate(sequence, n_tokens)

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with a slot of its own, which is copied at once."""
        self.check_own(sequence)
        copy = self.new()
        if sequence.tokens:
            self.extend(copy, 0)
            self._copy(sequence.blocks[0], copy.blocks[0])
            copy.tokens = list(sequence.tokens)
        copy.decoded = sequence.decoded
        return copy

    def trim(self, sequence: Sequence) -> None:
        """Give the slot of a sequence without tokens back."""
        if not sequence.tokens and sequence.blocks:
            self.pool.drop(sequence.blocks[0])
            sequence.blocks.clear()


class SlotCalls(Calls):
    """Calls over slots: after a past, attention takes several tokens of one slot, or one of each of a range of
    slots."""

    def __init__(self, sessions: Sessions, slabs: Slabs, outputs: int, vocab_size: int, pool: SlotPool):
        super().__init__(sessions, slabs, outputs, vocab_size)
        self._pool = pool
        self._written: dict[int, int] = {}
        """Tokens of this pass that slots hold already."""
        self._recorded: set[tuple[int, int]] = set()
        """Ranges of slots whose step was recorded while all of them were idle."""

    def of(self, segments: Items[Segment]) -> Iterator[Call]:
        """Yield single tokens last: states are changed where they are then, when nothing is left to be cancelled."""
        row, single, several = 0, list[_Single](), list[tuple[Segment, list[int]]]()
        self._written.clear()
        for segment in segments:
            targets = list(range(row, row := row + len(segment.outputs)))
            if len(segment.ids) == 1 and (segment.sequence.tokens or not self.slabs.recurrent):
                single.append((segment.sequence.blocks[0], segment, targets))
            else:
                several.append((segment, targets))
        for segment, targets in several:
            yield self._chunk(segment, targets)
            self._written[segment.sequence.blocks[0]] = len(segment.ids)
        for part in self._ranges(sorted(single, key=lambda item: item[0])):
            yield from self._together(part)

    def _chunk(self, segment: Segment, targets: list[int]) -> Call:
        """The call of several tokens of a slot, whose states are those from before until it is complete."""
        slot, end = segment.sequence.blocks[0], len(segment.sequence) + len(segment.ids)
        inputs = {"input_ids": np.array([segment.ids], np.int64), **_lengths(np.array([end], np.int32))}
        if not self.slabs.recurrent:
            return self._several(inputs, list(segment.outputs), targets, slot, 1)

        inputs |= _running(np.ones(1, np.int32), len(segment.ids))
        call = self._several(inputs, list(segment.outputs), targets, slot, 1)
        self.slabs.bind_states(call.binding, slot if segment.sequence.tokens else self.slabs.empty,
                               self.slabs.unfinished)
        return call._replace(changes=(segment.sequence,), commit=partial(
            self.sessions.copy, self.slabs, self.slabs.unfinished, slot, states_alone=True))

    def _ranges(self, single: list[_Single]) -> Iterator[list[_Single]]:
        """Slots that decode together: one call takes a range, whose idle slots write a row after their end, where they
        have room for one."""
        part: list[_Single] = []
        for item in single:
            if part and any(self._length(slot) >= self.slabs.positions for slot in range(part[-1][0] + 1, item[0])):
                yield part
                part = []
            part.append(item)
        if part:
            yield part

    def _length(self, slot: int) -> int:
        owner = self._pool.owner(slot)
        return 0 if owner is None else len(owner.tokens) + self._written.get(slot, 0)

    def _padded(self, first: int, count: int) -> int:
        """Return the number of slots of a recorded step, idle ones after the last included where these have room."""
        slots = len(self._pool)
        size = step_size(count, slots - first)
        full = any(self._length(slot) >= self.slabs.positions for slot in range(first + count, first + size))
        return count if full or not self.sessions.provider.graphs else size

    def _together(self, part: list[_Single]) -> Iterator[Call]:
        """The call of single tokens of a range of slots; where it is recorded, from slot 0 on if that can be, because
        each range is a graph of its own.

        Recording runs a model several times, so that a call before it, in which all slots are idle, is recorded where
        there are states.
        """
        first = part[0][0]
        while self.sessions.provider.graphs and first and self._length(first - 1) < self.slabs.positions:
            first -= 1
        count = self._padded(first, part[-1][0] - first + 1)
        ids = np.zeros((count, 1), np.int64)
        lengths = _lengths(np.array([self._length(slot) + 1 for slot in range(first, first + count)], np.int32))
        rows, targets, sample_specs = list[int](), list[int](), list[tuple[int, int]]()
        for slot, segment, wanted in part:
            ids[slot - first] = segment.ids[0]
            rows += [slot - first] * len(wanted)
            targets += wanted
            sample_specs += sampled(segment)
        inputs = {"input_ids": ids, **lengths}
        if self.slabs.recurrent:
            inputs["active"] = np.isin(np.arange(first, first + count), [slot for slot, _, _ in part]).astype(np.int32)
        longest = {"total_sequence_length": np.array([self.slabs.positions], np.int32)}

        def bound() -> Inputs:
            more = _running(np.zeros(count, np.int32)) if self.slabs.recurrent else {}  # the step keeps these arrays
            return {**inputs, **longest, **more, "output_rows": np.arange(count)}

        if self.sessions.provider.graphs:  # recorded with the slots' length, which gives the same and costs more here
            del inputs["total_sequence_length"]
        given = (first, count), rows, targets, sample_specs, bound
        if not self.slabs.recurrent:
            yield self._step(inputs, *given)
            return
        if self.sessions.provider.graphs and (first, count) not in self._recorded:
            yield self._step({**inputs, "active": np.zeros(count, np.int32)}, (first, count), [], [], [], bound)
            self._recorded.add((first, count))  # not where that call was cancelled
        yield self._step(inputs, *given)._replace(changes=tuple(segment.sequence for _, segment, _ in part))

    def _step(self, inputs: Inputs, key: tuple[int, int], rows: list[int], targets: list[int],
              sample_specs: list[tuple[int, int]], bound: Callable[[], Inputs]) -> Call:
        """The call of a range of slots, from the first and of this many."""
        return self._one_each(key, inputs, rows, targets, sample_specs, bound, *key)


def _running(active: np.ndarray, tokens: int = 1) -> Inputs:
    """Return which slots change their states, and where the tokens of each begin."""
    return {"active": active, "cumulative_sequence_length": tokens * np.arange(len(active) + 1, dtype=np.int32)}


def _lengths(ends: np.ndarray) -> Inputs:
    """Return the lengths of slots from their positions, new tokens included."""
    return {"seqlens_k": ends - 1, "total_sequence_length": ends.max(keepdims=True)}
