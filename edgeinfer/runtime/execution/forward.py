"""One forward pass of a linked program: validation, description for the threads, and its number of steps."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import RequestError
from edgeinfer.graph import Graph
from edgeinfer.kernels import Kernels, abi
from edgeinfer.memory_planner import MemoryPlan
from edgeinfer.runner import DECODE, Cancellation, Runner, Segment, Sequence, prepare_samples

from ..kv.sequence import KVCache
from ..program.program import Program
from .executor import Executor
from .splits import SPLIT_ROWS, tokens_to_split
from .tables import Tables, decoded_last
from .thread_tuner import ThreadTuner
from .threads import Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

Logits: TypeAlias = "NDArray[np.float32]"


class RowReader(Protocol):
    """Reads the rows in front of the output head in each forward pass over new tokens, such as a head that drafts."""

    @property
    def stop(self) -> int:
        """Return the instruction before which they are read."""

    def take(self, segments: Items[Segment]) -> None:
        """Read the rows of all tokens of a forward pass that has come to that instruction."""

    def follow(self, segments: Items[Segment], cancel: Cancellation | None) -> None:
        """Use them, before the sequences commit the tokens."""

    def forked(self, sequence: Sequence, copy: Sequence) -> None:
        """Give a fork the state that is kept of a sequence."""


class ModelRunner(Runner):
    """A program over planned memory, and its forward passes; whose sequences they are is known to `kv`."""

    graph: Graph
    plan: MemoryPlan
    config: RuntimeConfig
    """Settings of the run, completed."""
    kv: KVCache
    executor: Executor
    row_reader: RowReader | None = None

    def _link(self, program: Program, kernels: Kernels, regions: dict[str, NDArray[np.uint8]], pool: Pool | None,
              tuner: ThreadTuner) -> None:
        """Make a program ready to run over these regions."""
        n, self.program = self.plan.request.rows_of(self.graph.logits), program
        self.selects = self.graph.chooses_values
        self._logits: Logits = regions["logits"][: n * self.plan.logits_stride].view(np.float32)
        self._logits = self._logits.reshape(n, -1)[:, : self.graph.logits.width]
        self._counts: tuple[tuple[int, int], ...] = ()
        self._first_sample = program.first_sample
        slot = self.plan.state.slot_bytes if self.plan.state else 0
        self._tables = Tables(self.plan.request.tokens, self.config.max_sequences, slot)
        self.executor = Executor(program, kernels, self.plan.request.threads, regions, pool, tuner)
        for word, table in ((abi.CTX_TOKENS, self._tables.tokens), (abi.CTX_SEQUENCES, self._tables.sequences),
                            (abi.CTX_OUTPUTS, self._tables.outputs), (abi.CTX_SAMPLES, self._tables.sample_specs),
                            (abi.CTX_CHOSEN, self._tables.steps)):
            self.executor.set(word, table.ctypes.data)

    def _admit(self, segments: Items[Segment]) -> None:
        """Refuse a forward pass that does not fit the plan or makes no sense."""
        most = self.plan.request
        self.check_pass(segments, most.tokens)
        decoded = sum([len(segment.ids) for segment in segments if segment.role == DECODE]) if self.selects else 0
        if decoded > most.decoded_tokens:
            raise RequestError(f"{decoded} tokens in decode role are more than the {most.decoded_tokens} for whose "
                               "scores the plan has room; raise outputs.")
        for segment in segments:
            self.kv.check_own(segment.sequence)
            self.check(segment.sequence, segment.ids)
            segment.check()
            if self.kv.states and segment.parents and any(p != i - 1 for i, p in enumerate(segment.parents)):
                raise RequestError("Recurrent layers run no trees of tokens; run them as a chain, without parents.")

    def _steps(self, segments: Items[Segment], further: int, offset: int = 0) -> int:
        """Return the number of further steps that a forward pass over one token of each sequence takes without Python.

        Limited by their time, by the blocks of the sequences, and by lengths at which attention is split differently.
        """
        executor, longest = self.executor, max(len(segment.sequence) for segment in segments) + offset + 1
        if executor.check or executor.stream or self.row_reader:
            return 0
        if not all(all(segment.sample_specs) for segment in segments):
            return 0
        most = executor.tuner.further(len(segments), len(self.program.instructions))
        further = min(further, most, self.plan.request.ctx - longest)
        if longest <= SPLIT_ROWS:
            further = min(further, SPLIT_ROWS - longest)
        if self.kv.states and not self.kv.states.steps([segment.sequence for segment in segments]):
            return 0
        return further if self.kv.fits([(segment.sequence, offset + 1 + further) for segment in segments]) else 0

    def _run(self, segments: Items[Segment], first: int, stop: int | None, offset: int,
             cancel: Cancellation | None, further: int = 0, rows: NDArray[np.int64] | None = None) -> Logits:
        """Describe a forward pass and run it."""
        with self.executor.pool.turn:
            n, outputs, sampled = self._tables.write(segments, offset, rows)
            decoded = sum([len(part.ids) for part in segments if part.role == DECODE])
            split = self._split(segments, offset)
            counts = ((abi.COUNT_TOKENS, n), (abi.COUNT_SEQUENCES, len(segments)),
                      (abi.COUNT_OUTPUTS, outputs), (abi.COUNT_MERGE, split),
                      (abi.COUNT_SAMPLES, outputs if sampled else 0), (abi.COUNT_SEVERAL, n if n > 1 else 0),
                      (abi.COUNT_DECODED, decoded), (abi.COUNT_PROMPTED, n - decoded))
            if counts != self._counts:  # from token to token they seldom change
                self._counts = ()  # an interruption may come between any two of these lines
                for index, value in counts:
                    self.executor.set_count(index, value)
                self._counts = counts
            logits, reader = self._logits[:outputs], self.row_reader if stop is None else None
            if reader:
                self.executor.run(first, reader.stop, cancel)
                reader.take(segments)
                first = reader.stop
            if any([segment.prepare for segment in segments]):
                first = self._prepare(segments, first, cancel)
            self.executor.run(first, stop, cancel, further)
            if reader:
                reader.follow(segments, cancel)
        return logits

    def _prepare(self, segments: Items[Segment], first: int, cancel: Cancellation | None) -> int:
        """Complete the data that samples read while the instructions before the first one run; returns where to
        continue.

        It is completed before a pass that is too short to be cut in two, and where weights in storage are read for a
        whole pass.
        """
        n = sum(len(segment.ids) for segment in segments)
        if self._first_sample <= first or self.executor.stream or self.executor.tuner.short(n, first,
                                                                                            self._first_sample):
            prepare_samples(segments)
            return first
        self.executor.run(first, self._first_sample, cancel, meanwhile=partial(prepare_samples, segments))
        return self._first_sample

    def _split(self, segments: Items[Segment], offset: int) -> int:
        """Return how many of the last tokens of a pass have their attention split along the context."""
        model = self.model
        return tokens_to_split(decoded_last(segments), offset, self.plan.request.threads, model.num_attention_heads,
                               model.num_key_value_heads)
